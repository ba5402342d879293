// LoopServe's scorer for decoding: the attention that the newest tokens pay, of the prompt at first and then of the
// answer.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the probability mass that the conversation's last `window` queries give it, prompt and answer
/// alike.
///
/// The softmax runs over all keys, causal inside the window; masses are summed over its rows and over the query heads
/// of the group, then pooled where `pool` is above 1. The observed tokens are always kept and count into the budget.
/// With fewer tokens in the conversation than `window`, all rows are observed.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   window or pool out of range, window above the budget, an even pool: tessera::error.
/// Cost     `window` queries in fp32 for each layer, as long as the conversation; two passes over K with window * group
///          rows whenever the schedule asks.
/// Paper    Li et al., LoopServe, arXiv:2507.13681, Sec. 5.2 and Algorithm 6. Differs: the observed tokens are forced;
///          how many are observed is a number of its own, apart from how often; pooling may be asked for, the paper has
///          none.
struct newest_queries {
  static constexpr const char* name = "newest_queries";
  static constexpr observes observed = observes::window;
  static constexpr bool comparable_across_heads = true, window_follows = true;

  index_t window = 16;
  index_t pool = 1;

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }

  index_t protected_tail(index_t) const { return window; }

  pooling_window pooled() const { return {pool, pooling::max}; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(pool % 2 == 1, "pool", pool, "an odd number", "pass 1 for no pooling");
    require(window <= budget, "observed", window, "at most the budget, which is " + std::to_string(budget),
            "observe fewer tokens or raise the budget: the observed tokens are always read");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("observed", self.window, value_range{1, 1 << 12},
          "newest tokens whose queries choose; they are always read and count into the budget");
    visit("pool", self.pool, value_range{1, 4095},
          "kernel of the max-pooling over tokens, odd; 1 for none, as published");
  }
};

static_assert(check_scorer<newest_queries>() && following_scorer<newest_queries>);

TESSERA_NAMESPACE_END
