// full: nothing is dropped, everything is read. The baseline that every other method is compared with.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"

TESSERA_NAMESPACE_BEGIN

/// Dense attention over the whole cache. Has no budget.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct full : recipe<retain_all, Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "full";
  static constexpr const char* paper = "the uncompressed cache";
};

TESSERA_NAMESPACE_END
