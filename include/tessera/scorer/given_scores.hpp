// Scores that the engine gives: a learned gate, retrieval heads, anything that is known outside of the cache.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Ranks tokens by the scores that the engine sets (`set_scores` of a cache), higher ones first. The newest `recent`
/// tokens are always kept; the first `sinks` slots come before all others but these. A NaN ranks last.
/// Shapes   scores [kv_heads, tokens], fp32, stored beside the tokens and compacted with them.   Unit: token.
/// Errors   sinks or recent out of range, recent above the budget: tessera::error.
/// Cost     4 bytes a stored token and kv_head; none that depends on queries.
/// Paper    none. Learned gates (FastKVzip) and masks of retrieval heads are scores that can be given so.
struct given_scores {
  static constexpr const char* name = "given_scores";
  static constexpr observes observed = observes::given;
  static constexpr bool comparable_across_heads = true;

  index_t sinks = 0, recent = 0;

  TESSERA_HD float finish_at(const float* in, index_t, index_t i) const {
    return i < sinks && in[i] == in[i] ? infinity : in[i];
  }
  index_t protected_tail(index_t) const { return recent; }

  void check(index_t budget) const {
    check_parameters(*this);
    require(recent <= budget, "recent", recent, "at most the budget, which is " + std::to_string(budget),
            "pass 0 to keep none by their age");
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("sinks", self.sinks, value_range{0, max_tokens}, "first tokens that come before all but the newest");
    visit("recent", self.recent, value_range{0, max_tokens}, "newest tokens that are always kept");
  }
};

static_assert(check_scorer<given_scores>());

TESSERA_NAMESPACE_END
