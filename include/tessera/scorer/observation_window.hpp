// SnapKV's scorer: the attention that the last prompt queries pay to each token, pooled over neighbours.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the probability mass that the turn's last `window` queries give it.
///
/// The softmax runs over all keys, causal inside the window; masses are summed over the window's rows and over the
/// query heads of the group, then pooled. The window's own tokens are always kept: they are not ranked, and pooling
/// runs over the tokens before them. A turn with fewer prompt tokens than `window` observes the rows that there are.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   window or pool out of range, window above the budget, an even pool: tessera::error.
/// Cost     two passes over K with window * group rows (one when the engine hands over the rows' log-sum-exp).
/// Paper    SnapKV, arXiv:2404.14469. Differs: per kv_head (sum over the group) instead of per query head, fp32
///          softmax, tokens kept in position order; RocketKV and Ada-KV do the same.
struct observation_window {
  static constexpr const char* name = "observation_window";
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true;
  static constexpr index_t max_window = 1 << 15;  ///< these queries are remembered while a prompt comes in
  static constexpr index_t max_pool = 4095;       ///< averages cost as many additions a token

  index_t window = 32;
  index_t pool = 7;
  pooling pool_kind = pooling::max;

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }

  index_t protected_tail(index_t) const { return window; }

  pooling_window pooled() const { return {pool, pool_kind}; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(window <= budget, "window", window, "at most the budget, which is " + std::to_string(budget),
            "lower the window or raise the budget: the window's own tokens are always kept");
    require(pool % 2 == 1, "pool", pool, "an odd number", "pass 1 for no pooling");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("window", self.window, value_range{1, max_window},
          "last prompt queries that are observed; their tokens are always kept");
    visit("pool", self.pool, value_range{1, max_pool}, "kernel of the pooling over tokens, odd; 1 for none");
    visit("pool_kind", self.pool_kind, one_word_of{"max or average"}, "how scores are pooled");
  }
};

static_assert(check_scorer<observation_window>());

TESSERA_NAMESPACE_END
