// SnapKV over ThinK's rows.
#pragma once

#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/think.hpp>

TESSERA_NAMESPACE_BEGIN

template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct think_snapkv : snapkv<T, D, Dv, think_rows<Layout>> {
  static constexpr const char* name = "think_snapkv";
  static constexpr const char* paper = "SnapKV, arXiv:2404.14469, over ThinK's rows, arXiv:2407.21018";
};

TESSERA_NAMESPACE_END
