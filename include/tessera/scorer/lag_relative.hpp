// LagKV's scorer: rows that spread most beside the tokens behind them.
#pragma once

#include <cmath>
#include <string>

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by its rank in its partition of `lag` tokens. Keys and values are put on the scale of each channel's
/// range over the next partition; the standard deviation over the channels is a row's spread, softmaxes of spreads over
/// the partition are averaged over K and V, and ranked.
///
/// The first `sinks` slots and everything from the last full partition on come before all others, the newer the better;
/// so does everything while there are fewer than two partitions. A channel that does not vary in the next partition
/// counts as 0.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   parameters out of range, or no room left beside the sinks: tessera::error.
/// Cost     two reads of K and V when a prompt ends; lag comparisons a token.
/// Paper    LagKV, arXiv:2504.04704, as kvpress 0.5.5 has it (without cross scoring). Ties to the lower slot; where not
///          all of the protected tail has room, its newest tokens stay.
struct lag_relative {
  static constexpr const char* name = "lag_relative";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = false;
  static constexpr int measures = 2;  ///< sums of the scaled elements and of their squares

  index_t sinks = 4;
  index_t lag = 128;

  /// Where a channel does not vary, or by less than has an inverse, every finite element scales to 0.
  TESSERA_HD channel_scale scale(float low, float high) const {
    const float factor = 1 / (high - low);
    return high > low && factor < infinity ? channel_scale{factor, -low * factor} : channel_scale{};
  }
  TESSERA_HD void measure(float x, const channel_scale& of, float* sums) const {
    const float scaled = x * of.factor + of.shift;  // not finite where x is not
    sums[0] += scaled;
    sums[1] += scaled * scaled;
  }
  TESSERA_HD float spread(const float* sums, index_t channels) const {
    const float variance = (sums[1] - sums[0] * sums[0] / float(channels)) / float(channels - 1);
    return variance < 0 ? 0.0f : std::sqrt(variance);
  }
  TESSERA_HD float ranked(index_t rank) const { return float(rank) / float(lag); }
  TESSERA_HD float outside(index_t slot, index_t stored) const {
    if (slot < sinks) return infinity;
    // They are among the last 2 * lag slots, or all: whole numbers tell them apart, however much is stored.
    const index_t behind = 3 * lag - (stored - slot);
    return float(behind > 1 ? behind : 1);
  }

  index_t protected_tail(index_t) const { return 0; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(sinks < budget, "sinks", sinks, "at most one less than the budget, which is " + std::to_string(budget),
            "lower the sinks or raise the budget: recent tokens need room too");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks, value_range{0, max_tokens}, "first tokens that are always kept");
    visit("lag", self.lag, value_range{2, 1 << 15},
          "tokens of a partition, which the partition before it is measured against");
  }
};

static_assert(check_scorer<lag_relative>() && lagged_scorer<lag_relative>);

TESSERA_NAMESPACE_END
