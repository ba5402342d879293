// Facts about the stages of a recipe, all derived from the policies. A stage that does nothing has no policies.
#pragma once

#include <type_traits>
#include <utility>

#include "concepts/budget.hpp"
#include "concepts/host_only.hpp"
#include "concepts/scope.hpp"
#include "concepts/scorer.hpp"
#include "concepts/selector.hpp"
#include "core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

/// The type of the budget that allots tokens once a plan has been made.
template <class Budget>
struct planned_budget {
  using type = Budget;
};
template <planning_budget Budget>
struct planned_budget<Budget> {
  using type = decltype(std::declval<const Budget>().planned(stage_plan{}));
};

/// Stands for a missing policy of a stage.
struct no_policy {};

/// What a policy observes; none observes nothing.
template <class Policy>
constexpr observes observed_by() {
  if constexpr (requires { Policy::observed; }) return Policy::observed;
  return observes::nothing;
}

/// The range of budgets that callers may set in a first stage: the range that its policy names, else any number.
template <class Budget>
constexpr value_range<index_t> budgets_of() {
  if constexpr (requires { Budget::budgets; }) return Budget::budgets;
  return token_budgets;
}

}  // namespace detail

/// What a first stage is, derived from its policies; without policies, a stage that keeps everything.
template <class Scorer = detail::no_policy, class Budget = detail::no_policy, class Selector = detail::no_policy,
          class Scope = detail::no_policy>
struct first_stage_facts {
  using planned_budget = typename detail::planned_budget<Budget>::type;
  static constexpr bool chooses = !std::is_same_v<Scorer, detail::no_policy>;
  /// Whether tokens that were not chosen are dropped from memory.
  static constexpr bool drops = false;
  /// Whether chosen tokens stay when more of a prompt is appended.
  static constexpr bool settles = false;
  static constexpr bool host_only = !runs_on_devices<Scorer, Budget, planned_budget, Selector, Scope>;
  /// Whether a prompt needs the boundaries of its segments, and stored tokens a column of segments.
  static constexpr bool needs_segments = segment_scorer<Scorer> || segment_selector<Selector>;
  /// Whether the budget gives shares of a turn's new tokens.
  static constexpr bool shares = share_budget<planned_budget>;
  /// Whether layers may reuse the choice of another one.
  static constexpr bool reuses = reusing_scope<Scope>;
  /// Whether one threshold holds for all layers.
  static constexpr bool over_model = model_scope<Scope>;
  /// What the scorer observes.
  static constexpr observes observed = detail::observed_by<Scorer>();
  /// Whether an engine must pass a prompt through the model once more before it ends.
  static constexpr bool rereads = observed == observes::rereading;
  /// Whether an engine must set the scores of a prompt's tokens.
  static constexpr bool takes_scores = observed == observes::given;
  /// Whether the query heads of a group may choose separately.
  static constexpr bool splits = splitting_scope<Scope>;
  /// Whether the scorer's window includes queries of decode steps.
  static constexpr bool follows = following_scorer<Scorer>;
  /// Whether the scorer undoes RoPE on queries: the model must then give its rope_frequencies.
  static constexpr bool needs_rope = statistical_scorer<Scorer>;
  /// Whether one token budget is split over both stages.
  static constexpr bool plans = planning_budget<Budget>;
  static constexpr value_range<index_t> budgets = chooses ? detail::budgets_of<Budget>() : value_range<index_t>{0, 0};
};

/// What a second stage is, derived from its policies; without policies, a stage that reads everything.
template <class Scorer = detail::no_policy, class Selector = detail::no_policy>
struct second_stage_facts {
  static constexpr bool retrieves = !std::is_same_v<Scorer, detail::no_policy>;
  static constexpr bool host_only = !runs_on_devices<Scorer, Selector>;
  /// Whether steps, and then prompts too, need the boundaries of their segments.
  static constexpr bool needs_segments = segment_mean_scorer<Scorer>;
  /// Whether a step adds up queries, or values, beside what it reads.
  static constexpr bool adds_up = needs_segments || requires { requires Scorer::adds_mean_value; };
  /// Whether `tokens` also pay for an estimate of the keys, in pages: then a step attends half of them.
  static constexpr bool estimates = paged_scorer<Scorer>;
  static constexpr value_range<index_t> budgets =
      retrieves ? (estimates ? estimating_budgets : token_budgets) : value_range<index_t>{0, 0};
};

TESSERA_NAMESPACE_END
