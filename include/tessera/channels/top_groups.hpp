// The groups of neighbouring channels with the largest sums of squares, of each vector.
#pragma once

#include "../concepts/channels.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/ordered.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores round(channels * dim) elements of every vector: the groups of 1, 2 or 4 neighbours with the largest sum of
/// squares. Each vector has a choice of its own, and therefore a bit for every group.
///
/// Ties     to the lower group; NaN ranks last.
/// Errors   channels out of range, or a group that is none of 1, 2, 4: tessera::error.
/// Cost     64 passes over the groups of a vector.
/// Paper    MosaicKV, arXiv:2607.00760, Sec. 4.2 (largest absolute values), 5.5 (groups). Differs: groups by the sum of
///          squares, which is what dropping them loses; the paper does not say.
struct top_groups {
  static constexpr const char* name = "top_groups";

  float channels = 0.25f;
  index_t group = 1;

  /// Of the whole vector, before truncation.
  index_t stored_channels(int dim) const { return index_t(decimal_share(channels).nearest(dim)); }
  index_t group_size() const { return group; }

  TESSERA_HD void choose(const float* row, const packed_format& format, std::uint8_t* bits) const {
    const index_t groups = format.groups(), wanted = format.stored_channels / format.group;
    std::uint64_t keys[largest_head_dim];
    for (index_t g = 0; g < groups; ++g) {
      float energy = 0;
      for (index_t c = g * format.group; c < (g + 1) * format.group; ++c) energy += row[c] * row[c];
      keys[g] = rank_key(energy, g);
    }
    for (index_t i = 0; i < format.set_bytes(); ++i) bits[i] = 0;
    if (wanted <= 0) return;
    if (wanted >= groups) {
      for (index_t g = 0; g < groups; ++g) set_bit(bits, g);
      return;
    }
    // The wanted-th largest key, found bit by bit: keys differ, so that exactly `wanted` reach it.
    std::uint64_t least = 0;
    for (int bit = 63; bit >= 0; --bit) {
      const std::uint64_t trial = least | (std::uint64_t(1) << bit);
      index_t reaching = 0;
      for (index_t g = 0; g < groups; ++g) reaching += keys[g] >= trial;
      if (reaching >= wanted) least = trial;
    }
    for (index_t g = 0; g < groups; ++g) {
      if (keys[g] >= least) set_bit(bits, g);
    }
  }

  void check() const {
    check_parameters(*this);
    require(group == 1 || group == 2 || group == 4, "group", group, "1, 2 or 4",
            "pass how many channels stay together");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("channels", self.channels, value_range{0.0f, 1.0f}, "share of a vector's elements that stay");
    visit("group", self.group, value_range{1, 4}, "neighbouring channels that stay together: 1, 2 or 4");
  }
};

static_assert(check_channels<top_groups>());

TESSERA_NAMESPACE_END
