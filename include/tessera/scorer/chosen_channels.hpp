// SparQ's scorer: every key, but only the channels on which the query is large.
#pragma once

#include <algorithm>
#include <string>

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/coverage.hpp"

TESSERA_NAMESPACE_BEGIN

/// Estimates a step's probabilities from the `channels` channels with the largest sums of |q| over the group; the
/// newest `recent` tokens are always read. What the attended tokens lack of a row's estimated mass is given to the mean
/// of V: out = a * attention + (1 - a) * mean, a the estimated mass on them.
///
/// The mean is over all tokens of the kv_head up to the query, what is not finite counted as 0. The log-sum-exp that
/// comes with the output is that of the attended tokens. Left to the budget (0): channels = k_dim / ratio, at least 1.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   channels below 0 or above k_dim, recent below -1 or above what a step attends: tessera::error.
/// Cost     `channels` values of every key are read; keys once more, by channel, and a sum of V [v_dim] per kv_head are
///          held.
/// Paper    SparQ, arXiv:2312.04985, Sec. 4 (channels 32, recent a quarter of what is attended). Differs: channels by
///          the budget unless set, as RocketKV's comparison has it (arXiv:2502.14051, App. A.3), but at least 1; the
///          step's own token is one of the `recent` and not on top of what is attended.
struct chosen_channels {
  static constexpr const char* name = "chosen_channels";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = true;
  static constexpr bool normalised = true;
  static constexpr bool adds_mean_value = true;
  static constexpr index_t page = 1;

  index_t channels = 0;  ///< 0: by the budget
  index_t recent = -1;   ///< -1: a quarter of what a step attends

  chosen_channels fitted(double ratio, int k_dim) const {
    chosen_channels result = *this;
    if (channels == 0) result.channels = index_t(std::clamp(double(k_dim) / ratio, 1.0, double(k_dim)));
    require(result.channels <= k_dim, "channels", channels, "0 to the head dim, which is " + std::to_string(k_dim),
            "pass 0 to let the budget decide");
    return result;
  }

  TESSERA_HD bool takes_upper(float, float) const { return false; }
  TESSERA_HD float row_scale(float scale, float chosen, float whole) const {
    return coverage_scale(scale, chosen, whole);
  }

  index_t protected_tail(index_t read) const { return recent < 0 ? read / 4 : recent; }

  void check(index_t read) const {
    check_parameters(*this);
    require(recent <= read, "recent", recent, "at most what a step attends, which is " + std::to_string(read),
            "pass -1 for a quarter of it");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("channels", self.channels, value_range{0, largest_head_dim},
          "channels of a key that a score reads; 0: by the budget");
    visit("recent", self.recent, value_range{-1, max_tokens},
          "newest tokens that are always read; -1 for a quarter of what a step attends");
  }
};

static_assert(check_scorer<chosen_channels>());

TESSERA_NAMESPACE_END
