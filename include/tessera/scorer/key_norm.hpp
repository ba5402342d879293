// KNorm's scorer: keys of small norm draw attention.
#pragma once

#include <cmath>

#include "../concepts/scorer.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by minus the Euclidean norm of its key, whatever the queries.
/// Shapes   scores [kv_heads, tokens].   Unit: token. Nothing is kept whatever its score.
/// Cost     one read of K when a prompt ends.
/// Paper    Devoto et al., arXiv:2406.11430, as kvpress 0.5.5 has it: keys after RoPE, the norm in fp32.
struct key_norm {
  static constexpr const char* name = "key_norm";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = false;
  static constexpr stored_rows reads = stored_rows::keys;
  static constexpr int measures = 1;

  TESSERA_HD void measure(float x, float, float* sums) const { sums[0] += x * x; }
  TESSERA_HD float score(const float* sums) const { return -std::sqrt(sums[0]); }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

static_assert(check_scorer<key_norm>() && contents_scorer<key_norm> && !anchored_scorer<key_norm>);

TESSERA_NAMESPACE_END
