// RocketKV's budget: one token budget for both stages, split by how hard the cache is compressed.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "../concepts/budget.hpp"
#include "../core/error.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// The share of the compression that the first stage does: an exponent in [0, 1], or the formula of RocketKV.
struct split_factor {
  bool adaptive = true;
  double fixed = 0;  ///< used where it is not adaptive

  split_factor() = default;
  explicit split_factor(double factor) : adaptive(false), fixed(factor) {}

  /// r: of a compression by c, the first stage compresses by c^r. Adaptive: min(0.2 + 0.06 log2 c, 0.8).
  double exponent(double c) const { return adaptive ? (std::min)(0.2 + 0.06 * std::log2(c), 0.8) : fixed; }
  bool operator==(const split_factor&) const = default;
};

/// The values that a split may have.
struct split_factors {
  static constexpr value_range<double> fixed{0, 1};
  std::string text() const { return "adaptive, or " + fixed.text(); }
  void check(const char* name, split_factor split, const std::string& cure) const {
    require(split.adaptive || fixed.holds(split.fixed), name, split.fixed, text(), cure);
  }
};

/// Splits a token budget t over both stages: what a step reads to estimate scores and to attend is worth t tokens.
///
/// With S = prompt + max_new and c = max(1, S / t), the first stage compresses by c^r and the second by the rest:
/// capacity = S / c^r rounded down, at least min(2 max_new, S); of it max_new is room for the answer and the rest is
/// what the first stage keeps, allotted to heads by `Inner`. A step attends t / 2 tokens; the other half pays for the
/// estimate, which may read 1 / ratio of the keys, ratio = max(1, capacity / t).
/// The plan is made whenever a turn's prompt ends, for all tokens that the conversation has taken until then as the
/// prompt. A turn keeps at least the t / 2 tokens that a step attends.
/// Errors   a parameter out of range: tessera::error. Room for the window is checked by the
///          recipe, when the prompt's length is known.
/// Cost     a few operations for each conversation; then that of `Inner`.
/// Paper    RocketKV, arXiv:2502.14051, Sec. 3.6; rounding and the floor of 2 max_new from its accuracy code.
template <class Inner>
struct two_stage {
  static constexpr const char* name = "two_stage";
  static constexpr bool compares_heads = Inner::compares_heads;
  static constexpr value_range<index_t> budgets = estimating_budgets;

  index_t tokens = 1024;  ///< t
  index_t max_new = 128;
  split_factor split{};
  Inner inner{};

  stage_plan plan(index_t prompt) const {
    const double budget = double(tokens), all = double(prompt) + double(max_new);
    const double c = (std::max)(1.0, all / budget);
    const double least = (std::min)(2.0 * double(max_new), all);
    const double capacity = (std::max)(std::floor(all / std::pow(c, split.exponent(c))), least);
    constexpr double most = (std::numeric_limits<index_t>::max)();
    require(all <= most, "max_new", max_new, "at most 2^31 - 1 with the prompt", "pass how many tokens a turn decodes");
    stage_plan result;
    result.capacity = index_t(capacity);
    result.retained = result.capacity - max_new;
    result.read = tokens / 2;
    result.ratio = (std::max)(1.0, capacity / budget);
    return result;
  }

  void require_room(const stage_plan& plan, index_t window) const {
    require(plan.retained >= window, "max_new", max_new,
            "a number that leaves room for the window of " + std::to_string(window) + " tokens: with a prompt of " +
                std::to_string(plan.prompt) + " the first stage keeps " + std::to_string(plan.retained),
            "raise the budget or max_new, or lower the window");
  }

  Inner planned(const stage_plan& plan) const {
    Inner result = inner;
    result.tokens = (std::max)(plan.retained, plan.read);
    return result;
  }

  /// Without a plan, `tokens` are allotted.
  void allot(const layer_scores& scores, index_t* counts) const {
    Inner unplanned = inner;
    unplanned.tokens = tokens;
    allot_counts(unplanned, scores, counts);
  }

  void check() const {
    budgets.check("budget", tokens, "the token budget pays for estimating scores and for attending");
    check_parameters(*this);
    Inner checked = inner;
    checked.tokens = tokens;
    checked.check();
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("max_new", self.max_new, value_range{0, max_tokens},
          "tokens that a turn decodes: they count into the sequence's length");
    visit("split", self.split, split_factors{}, "share of the compression that the first stage does");
    Inner::parameters(self.inner, visit);
  }
};

TESSERA_NAMESPACE_END
