// SentenceKV's budget: the first stage keeps several times what a step reads.
#pragma once

#include <algorithm>
#include <string>

#include "../concepts/budget.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// A step reads `tokens` of each kv_head; the first stage keeps `factor` times as many, allotted to heads by `Inner`.
///
/// Errors   tokens or factor out of range: tessera::error. Room for the window is checked when a prompt ends.
/// Cost     that of `Inner`.
/// Paper    the semantic factor of SentenceKV, arXiv:2504.00970: 3 in its LongBench runs, 2 in its RULER runs, 5 as its
///          code's default.
template <class Inner>
struct wider_first {
  static constexpr const char* name = "wider_first";
  static constexpr bool compares_heads = Inner::compares_heads;
  static constexpr value_range<index_t> budgets = token_budgets;

  index_t tokens = 1024;  ///< that a step reads
  index_t factor = 3;
  Inner inner{};

  stage_plan plan(index_t prompt) const {
    stage_plan result;
    result.retained = index_t((std::min<offset_t>)(offset_t(tokens) * factor, max_tokens));
    result.capacity = result.retained;
    result.read = tokens;
    result.prompt = prompt;
    return result;
  }
  void require_room(const stage_plan& plan, index_t window) const {
    require(plan.retained >= window, "budget", tokens,
            "a number that leaves room for the window of " + std::to_string(window) +
                " tokens: the first stage keeps " + std::to_string(plan.retained),
            "raise the budget or factor, or lower the window");
  }

  Inner planned(const stage_plan& plan) const {
    Inner result = inner;
    result.tokens = plan.retained;
    return result;
  }

  /// Without a plan, `tokens` are allotted.
  void allot(const layer_scores& scores, index_t* counts) const {
    Inner unplanned = inner;
    unplanned.tokens = tokens;
    allot_counts(unplanned, scores, counts);
  }

  void check() const {
    budgets.check("budget", tokens, "pass how many tokens a step may read");
    check_parameters(*this);
    Inner checked = inner;
    checked.tokens = tokens;
    checked.check();
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("factor", self.factor, value_range{1, 1024}, "the first stage keeps so many times what a step reads");
    Inner::parameters(self.inner, visit);
  }
};

TESSERA_NAMESPACE_END
