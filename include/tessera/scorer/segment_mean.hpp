// SentenceKV's scorer: how well the segment that is being written matches each segment of the text.
#pragma once

#include "../concepts/scorer.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores all tokens of a segment alike: by the logit of the mean query of the segment that the answer is writing with
/// the mean of the segment's stored keys, summed over the query heads of the group. The first `start` stored tokens and
/// the newest `recent` come before all others. While the answer's segment has at most `whole` tokens, a step reads
/// everything.
///
/// All tokens of a segment tie, so top_tokens takes whole segments, the last of them cut behind its first tokens.
/// Shapes   scores [kv_heads, tokens].   Unit: token.
/// Errors   start, recent or whole out of range: tessera::error. Budgets below start + recent are allowed: the newest
///          tokens are then read first.
/// Cost     one mean key a segment and step; everything in a segment's first steps.
/// Paper    SentenceKV, arXiv:2504.00970, and its published code. Differs: one choice per kv_head (the code: per query
///          head); the segment that is being written competes with its stored tokens, as the others do (the code: once
///          it has ended); the token that ends a segment is read for as the others are (the code reads everything for
///          it, too).
struct segment_mean {
  static constexpr const char* name = "segment_mean";
  static constexpr observes observed = observes::step;
  static constexpr bool comparable_across_heads = false;

  index_t start = 32;
  index_t recent = 32;
  index_t whole = 1;

  TESSERA_HD float weigh(float logit, float) const { return logit; }

  index_t protected_tail(index_t) const { return recent; }

  void check(index_t) const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("start", self.start, value_range{0, max_tokens}, "first stored tokens that every step reads");
    visit("recent", self.recent, value_range{0, max_tokens}, "newest tokens that every step reads");
    visit("whole", self.whole, value_range{0, 256},
          "so many first tokens of each segment of the answer read everything that is stored");
  }
};

static_assert(check_scorer<segment_mean>() && segment_mean_scorer<segment_mean>);

TESSERA_NAMESPACE_END
