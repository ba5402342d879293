// KeyDiff's scorer: keys that point elsewhere than most.
#pragma once

#include <cmath>

#include "../concepts/scorer.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores a token by minus the cosine between its key and the mean of all keys of the head, each divided by its norm.
///
/// The mean runs over everything that the head stores when the prompt ends. A key that is not finite, or whose norm
/// overflows, has no part in it and ranks last; a key of zeros scores 0.
/// Shapes   scores [kv_heads, tokens], in [-1, 1].   Unit: token. Nothing is kept whatever its score.
/// Cost     two reads of K when a prompt ends.
/// Paper    KeyDiff, arXiv:2504.15364, as kvpress 0.5.5 has it. Differs: the whole prompt at once, not block by block.
struct key_difference {
  static constexpr const char* name = "key_difference";
  static constexpr observes observed = observes::nothing;
  static constexpr bool comparable_across_heads = true;
  static constexpr stored_rows reads = stored_rows::keys;
  static constexpr int measures = 3;  ///< sums of x * x, x * anchor, anchor * anchor

  TESSERA_HD void measure(float x, float anchor, float* sums) const {
    sums[0] += x * x;
    sums[1] += x * anchor;
    sums[2] += anchor * anchor;
  }
  TESSERA_HD float anchor_scale(const float* sums) const { return 1 / at_least(std::sqrt(sums[0]), 1e-12f); }
  TESSERA_HD float score(const float* sums) const {
    if (!(sums[0] < infinity)) return sums[0] - sums[0];  // NaN: of no finite norm
    return -sums[1] / (at_least(std::sqrt(sums[0]), 1e-8f) * at_least(std::sqrt(sums[2]), 1e-8f));
  }

  index_t protected_tail(index_t) const { return 0; }
  void check(index_t) const {}

  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}

 private:
  TESSERA_HD static float at_least(float x, float least) { return x < least ? least : x; }  // NaN stays
};

static_assert(check_scorer<key_difference>() && anchored_scorer<key_difference>);

TESSERA_NAMESPACE_END
