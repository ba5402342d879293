// The sum of a value's magnitudes: how much it can move what attention puts out.
#pragma once

#include "../concepts/scorer.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by the L1 norm of its value. As a weight, of the projected value where the engine gives the
/// projection.
/// Shapes   scores [kv_heads, tokens].   Unit: token. Nothing is kept whatever its score.
/// Cost     one read of V when a prompt ends.
/// Paper    CriticalKV, arXiv:2502.03805, as kvpress 0.5.5 has it, with the output projection.
struct value_norm {
  static constexpr const char* name = "value_norm";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = true;
  static constexpr stored_rows reads = stored_rows::values;
  static constexpr int measures = 1;

  TESSERA_HD void measure(float x, float, float* sums) const { sums[0] += x < 0 ? -x : x; }
  TESSERA_HD float score(const float* sums) const {
    return sums[0] < infinity ? sums[0] : sums[0] - sums[0];  // else NaN
  }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_scorer<value_norm>() && contents_scorer<value_norm>);

TESSERA_NAMESPACE_END
