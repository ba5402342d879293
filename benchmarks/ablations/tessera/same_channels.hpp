// The same channels for all vectors of a head, by their energy alone: what MosaicKV's choice for each vector is measured against.
#pragma once

#include <tessera/channels/head_channels.hpp>
#include <tessera/channels/top_groups.hpp>
#include <tessera/layout/packed/as_given.hpp>
#include <tessera/layout/packed/full_tails.hpp>
#include <tessera/layout/packed/rotated.hpp>
#include <tessera/methods/mosaickv.hpp>

TESSERA_NAMESPACE_BEGIN

struct same_channels : head_channels {
  static constexpr const char* name = "same_channels";
  static constexpr bool host_only = true;
  static constexpr index_t window = 0;

  index_t kept(int dim) const { return index_t(channels * float(dim) + 0.5f); }
  void choose_for_head(const double*, const double* rows, const packed_format& format, std::uint8_t* bits) const {
    head_channels::choose_for_head(nullptr, rows, format, bits);
  }
};

/// MosaicKV's rows with another choice of channels, or in another basis.
template <class Layout, class Channels, class Basis>
using ablated_rows = stored<packed_rows<typename Layout::rows_type, Channels, Channels, Basis, full_tails>,
                            typename Layout::placement_type>;

template <class Rows>
using ablated_mosaickv = recipe<retain_all, Rows, retrieve<block_mean, whole_blocks>, gathered_decode, once>;

TESSERA_NAMESPACE_END
