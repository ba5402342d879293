// H2O's scorer: the attention that a token has received from every query so far.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the probability mass that all queries since it arrived have given it, decode steps included.
///
/// Summed over the query heads of the group; not divided by the number of queries, so old tokens are favoured, as in
/// the original. The newest `recent` tokens are always kept.
/// Shapes   scores [kv_heads, tokens], fp32, stored beside the tokens and compacted with them.   Unit: token.
/// Errors   recent below 0 (other than -1) or above the budget: tessera::error.
/// Cost     two passes over K for every query: as much as attention itself.
/// Paper    H2O, arXiv:2306.14048. Differs: per kv_head; prompt scores are causal column sums (the masked simulation of
///          the reference lets future queries vote).
struct accumulated_attention {
  static constexpr const char* name = "accumulated_attention";
  static constexpr observes observed = observes::every_query;
  static constexpr bool comparable_across_heads = true;

  index_t recent = -1;  ///< -1: half of the budget

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }

  index_t protected_tail(index_t budget) const { return recent < 0 ? budget / 2 : recent; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(recent <= budget, "recent", recent, "at most the budget, which is " + std::to_string(budget),
            "pass -1 for half of the budget");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("recent", self.recent, value_range{-1, max_tokens},
          "newest tokens that are always kept; -1 for half of the budget");
  }
};

static_assert(check_scorer<accumulated_attention>());

TESSERA_NAMESPACE_END
