// The oracle of retrieval: the true attention probabilities of this step's queries.
#pragma once

#include "../concepts/scorer.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a stored token by the probability mass that the step's queries give it, summed over the group and the step.
///
/// Reads every key, so it saves nothing: it shows what the best choice of tokens would answer.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Cost     two passes over K a step.
/// Paper    Exact-TopK of RocketKV, arXiv:2502.14051, Appendix A.3. Differs: one selection for a group (sum of
///          probabilities) where the paper's oracle selects for each query head.
struct exact_score {
  static constexpr const char* name = "exact_score";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = true;

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }

  index_t protected_tail(index_t) const { return 0; }

  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_scorer<exact_score>());

TESSERA_NAMESPACE_END
