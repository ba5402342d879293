// MosaicKV without rotation, and with its choice of channels for each vector.
#pragma once

#include "../same_channels.hpp"

TESSERA_NAMESPACE_BEGIN

template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct mosaickv_unrotated : ablated_mosaickv<ablated_rows<Layout, top_groups, as_given>> {
  static constexpr const char* name = "mosaickv_unrotated";
  static constexpr const char* paper = "an ablation of MosaicKV, arXiv:2607.00760";
};

TESSERA_NAMESPACE_END
