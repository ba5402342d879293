// ThinK's choice: one set of channels for all keys of a head.
#pragma once

#include <algorithm>

#include "../concepts/channels.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/share.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stores ceil(channels * dim) channels of a head, the share as a decimal. Dropped are those with the smallest product
/// of the mean square of the last 32 prompt queries and the mean square of the keys. Without queries the keys alone
/// decide; squares of queries that are not finite are ignored.
///
/// Ties     to the lower channel; a channel whose product is NaN is dropped first.
/// Errors   channels out of range: tessera::error.   Cost  one sort of a head's channels for each segment.
/// Paper    Xu et al., ThinK: Thinner Key Cache by Query-Driven Pruning, arXiv:2407.21018, and its code (window 32).
///          Differs: one set for a kv_head, by the mean over the query heads of its group.
struct head_channels {
  static constexpr const char* name = "head_channels";
  static constexpr index_t window = 32;

  float channels = 0.6f;

  index_t stored_channels(int dim) const { return index_t(decimal_share(channels).up(dim)); }
  index_t group_size() const { return 1; }

  void choose_for_head(const double* queries, const double* rows, const packed_format& format,
                       std::uint8_t* bits) const {
    double scores[largest_head_dim];
    index_t order[largest_head_dim];
    for (index_t c = 0; c < format.channels; ++c) {
      const double score = (queries ? queries[c] : 1) * rows[c];
      scores[c] = score == score ? score : -1;  // means of squares are never below 0
      order[c] = c;
    }
    std::sort(order, order + format.channels,
              [&](index_t a, index_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
    for (index_t i = 0; i < format.set_bytes(); ++i) bits[i] = 0;
    for (index_t i = 0; i < format.stored_channels; ++i) set_bit(bits, order[i]);
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("channels", self.channels, value_range{0.0f, 1.0f}, "share of a head's key channels that stay");
  }
};

static_assert(check_channels<head_channels>());

TESSERA_NAMESPACE_END
