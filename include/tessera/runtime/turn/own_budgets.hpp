// The budgets of one sequence: the recipe's, or those that `open` was given in their place.
#pragma once

#include <algorithm>

#include "../../core/error.hpp"
#include "../../planned.hpp"
#include "sequence_options.hpp"

TESSERA_NAMESPACE_BEGIN

/// How far a sequence has come: budgets that are shares follow it.
struct tokens_taken {
  index_t all = 0;       ///< since `open`, dropped ones included
  index_t answered = 0;  ///< of them, those of steps since the last prompt ended
};

/// The budgets that one sequence has in place of the recipe's.
template <class Recipe>
class own_budgets {
  using retain_type = typename Recipe::retain_type;
  using retrieve_type = typename Recipe::retrieve_type;
  static constexpr bool has_budget = retain_type::chooses || retrieve_type::retrieves;
  static constexpr bool has_read_tokens = retain_type::chooses && retrieve_type::retrieves && !retain_type::plans;

 public:
  /// None.
  own_budgets() = default;
  /// Errors   a budget that the recipe has not, or does not allow: tessera::error.
  /// Cost     for a share, the recipe's own check some thirty times.
  own_budgets(const Recipe& recipe, const sequence_options& options) : options_(options) {
    options.budget.check("budget");
    options.read_tokens.check("read_tokens");
    if (!options.is_given()) return;
    require(has_budget || !options.budget.is_given(), "budget of a sequence", "given", "none",
            "leave it out: the method keeps and reads everything");
    require(has_read_tokens || !options.read_tokens.is_given(), "read_tokens of a sequence", "given", "none",
            "pass budget: the method has no second budget for what a step reads");
    if constexpr (retain_type::shares) {
      require(!options.budget.is_given() || !recipe.retain.planned({}).budget.knows_shares(), "budget of a sequence",
              "given", "none with a profile", "leave it out, or the profile: its shares decide what heads keep");
    }
    if (options.budget.is_share()) {
      least_ = smallest(0, recipe.budget(), [&](index_t tokens) {
        Recipe tried = recipe;
        tried.set_budget(tokens);
        tried.check();
      });
    }
    Recipe own = fitted(recipe, {});
    if (options.read_tokens.is_share()) {
      least_read_ = smallest(0, recipe.retrieve.tokens, [&](index_t tokens) {
        Recipe tried = own;
        tried.retrieve.tokens = tokens;
        tried.check();
      });
      own = fitted(recipe, {});
    }
    own.check();
  }

  const sequence_options& options() const { return options_; }

  /// The recipe with this sequence's budgets, at some point of a turn.
  Recipe fitted(Recipe recipe, const tokens_taken& taken) const {
    if (!options_.is_given()) return recipe;
    // The last tokens that a first stage has judged, or judges now.
    const index_t judged = fires_in_steps<typename Recipe::schedule_type> ? taken.all : taken.all - taken.answered;
    if (options_.budget.is_given()) {
      const index_t tokens = options_.budget.over(retain_type::chooses ? judged : taken.all, least_);
      const index_t given = recipe.budget();
      recipe.set_budget(tokens);
      if (retain_type::plans && options_.budget.is_share() && tokens < given) {  // the plan must have room for a window
        recipe.set_budget(smallest(tokens - 1, given, [&](index_t tried) {
          recipe.set_budget(tried);
          (void)recipe.plan(judged);
        }));
      }
    }
    if constexpr (has_read_tokens) {
      if (options_.read_tokens.is_given()) {
        const index_t kept = retain_type::drops ? recipe.retain.plan_unchecked(judged).retained : judged;
        const index_t stored = (std::min)(judged, kept) + (taken.all - judged);
        recipe.retrieve.tokens = options_.read_tokens.over(stored, least_read_);
      }
    }
    return recipe;
  }

 private:
  /// The smallest number of tokens with which `check` does not throw; `refused` and less do not count. `allowed`: the
  /// result if no smaller one passes.
  template <class Check>
  static index_t smallest(index_t refused, index_t allowed, const Check& check) {
    const auto passes = [&](index_t tokens) {
      try {
        check(tokens);
      } catch (const error&) {
        return false;
      }
      return true;
    };
    if (allowed > refused + 1 && passes(refused + 1)) return refused + 1;
    while (allowed - refused > 1) {
      const index_t middle = refused + (allowed - refused) / 2;
      (passes(middle) ? allowed : refused) = middle;
    }
    return allowed;
  }

  sequence_options options_{};
  index_t least_ = 0, least_read_ = 0;  // what a share comes to at least
};

TESSERA_NAMESPACE_END
