// TOVA's scorer: what the newest query alone looks at.
#pragma once

#include "../concepts/scorer.hpp"
#include "../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the probability that the newest query gives it, summed over the query heads of the group. Every
/// new query replaces what was there. The newest token itself is always kept.
/// Shapes   scores [kv_heads, tokens], fp32, stored beside the tokens and compacted with them.   Unit: token.
/// Cost     two passes over K with one query of each head per chunk and per step.
/// Paper    TOVA, arXiv:2401.06104, as kvpress 0.5.5 has it: the newest token stays whatever its score.
struct newest_attention {
  static constexpr const char* name = "newest_attention";
  static constexpr observes observed = observes::every_query;
  static constexpr row_join rows = row_join::newest;
  static constexpr bool comparable_across_heads = true;

  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(logit - lse); }

  index_t protected_tail(index_t) const { return 1; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_scorer<newest_attention>());

TESSERA_NAMESPACE_END
