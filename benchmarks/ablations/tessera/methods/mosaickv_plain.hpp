// MosaicKV without rotation, and with the same channels for all vectors of a head.
#pragma once

#include "../same_channels.hpp"

TESSERA_NAMESPACE_BEGIN

template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct mosaickv_plain : ablated_mosaickv<ablated_rows<Layout, same_channels, as_given>> {
  static constexpr const char* name = "mosaickv_plain";
  static constexpr const char* paper = "an ablation of MosaicKV, arXiv:2607.00760";
};

TESSERA_NAMESPACE_END
