// SnapKV over MosaicKV's rows.
#pragma once

#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/snapkv.hpp>

TESSERA_NAMESPACE_BEGIN

template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct packed_snapkv : snapkv<T, D, Dv, mosaic_rows<Layout>> {
  static constexpr const char* name = "packed_snapkv";
  static constexpr const char* paper = "SnapKV, arXiv:2404.14469, over MosaicKV's rows, arXiv:2607.00760";
};

TESSERA_NAMESPACE_END
