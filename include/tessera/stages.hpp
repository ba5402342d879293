// The two stages of a recipe. First: which tokens stay stored, or which ones a turn may read. Second: which ones a
// decode step reads. A stage that does nothing is a type with the same members.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "concepts/budget.hpp"
#include "concepts/host_only.hpp"
#include "concepts/scope.hpp"
#include "concepts/scorer.hpp"
#include "concepts/selector.hpp"
#include "core/error.hpp"
#include "core/parameters.hpp"
#include "scope/per_head.hpp"
#include "stage_facts.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

template <class Scorer, class Budget, class Selector, class Scope>
constexpr bool check_first_stage() {
  static_assert(check_scorer<Scorer>() && check_budget<Budget>() && check_selector<Selector>() && check_scope<Scope>());
  static_assert(has_parameters<Scorer> && has_parameters<Budget> && has_parameters<Selector>,
                "tessera: a policy must show its run-time parameters: static void parameters(self, visit)");
  static_assert(
      Scorer::observed != observes::step,
      "tessera: a retained set cannot be chosen by a scorer that only sees one decode step; use it in retrieve");
  static_assert(!Budget::compares_heads || Scorer::comparable_across_heads,
                "tessera: a budget that compares heads needs a scorer whose scores are comparable across heads");
  static_assert(!std::is_same_v<typename Selector::unit, page_unit>,
                "tessera: whole pages cannot meet a head's count exactly; choose them in retrieve");
  static_assert(!(joining_scope<Scope> || splitting_scope<Scope>) || !weighted_scorer<Scorer>,
                "tessera: weights are those of a kv_head's own values; take the scope per_head");
  static_assert(!multiplied_scorer<Scorer> || !lies_beside_tokens(Scorer::observed),
                "tessera: scores that accumulate beside the tokens cannot be multiplied; take weighted_by");
  static_assert(
      !model_scope<Scope> || (lies_beside_tokens(Scorer::observed) && Scorer::comparable_across_heads),
      "tessera: one threshold over the model needs the scores of all layers at once, comparable across heads: a scorer "
      "whose scores accumulate beside the tokens");
  static_assert(!model_scope<Scope> || keeps_heads_even<Budget>,
                "tessera: one threshold over the model allots what a budget gives to all heads alike; take uniform");
  static_assert(!splitting_scope<Scope> || (Scorer::observed == observes::window && !Budget::compares_heads),
                "tessera: query heads of a group choose apart by a window of queries, under a budget that compares no "
                "heads; take the scope per_head");
  static_assert(!joining_scope<Scope> || !Budget::compares_heads,
                "tessera: a budget that compares heads has nothing to compare where all heads of a layer keep the same "
                "slots; take a budget that goes by lengths, or the scope per_head");
  static_assert(
      !joining_scope<Scope> || !share_budget<Budget>,
      "tessera: a budget that gives each head a share of its own has nothing to give where all heads of a layer "
      "keep the same slots; take a budget that goes by lengths, or the scope per_head");
  return true;
}

}  // namespace detail

/// The common part of `retain` and `filter`: a scorer ranks, a budget counts, a selector chooses, for the heads of a
/// scope.
template <class Scorer, class Budget, class Selector, class Scope = per_head>
struct choosing_stage : first_stage_facts<Scorer, Budget, Selector, Scope> {
  using facts = first_stage_facts<Scorer, Budget, Selector, Scope>;
  using facts::observed, facts::plans;
  static_assert(detail::check_first_stage<Scorer, Budget, Selector, Scope>());
  using scorer_type = Scorer;
  using budget_type = Budget;
  using selector_type = Selector;
  using scope_type = Scope;

  Scorer scorer{};
  Budget budget{};
  Selector selector{};
  Scope scope{};

  index_t* tokens() { return &budget.tokens; }
  const index_t* tokens() const { return &budget.tokens; }

  void check() const {
    budget.check();
    // Under a plan, or a share of the prompt, the tokens of this stage are known only with the prompt's length.
    bool counted = !plans;
    if constexpr (share_budget<Budget>) counted = !budget.knows_shares();
    scorer.check(counted ? budget.tokens : (std::numeric_limits<index_t>::max)());
    selector.check();
    if constexpr (requires { scope.check(); }) scope.check();
  }

  /// The plan of a conversation that has taken `prompt` tokens when a turn's prompt ends.
  stage_plan plan(index_t prompt) const {
    const stage_plan result = plan_unchecked(prompt);
    if constexpr (plans)
      budget.require_room(result, (std::min)(scorer.protected_tail((std::max)(0, result.retained)), prompt));
    return result;
  }
  stage_plan plan_unchecked(index_t prompt) const {
    stage_plan result{prompt, budget.tokens, prompt};
    if constexpr (plans) result = budget.plan(prompt);
    result.prompt = prompt;
    return result;
  }

  /// Throws tessera::error if a policy was made for a model with other numbers of layers or kv_heads.
  void check_model(index_t layers, index_t kv_heads) const {
    const auto fitted = planned({});
    if constexpr (requires { fitted.budget.check_model(layers, kv_heads); })
      fitted.budget.check_model(layers, kv_heads);
  }

  /// How many of the last queries of a prompt chunk of `tokens` tokens the scorer observes.
  index_t queries_needed(index_t tokens) const {
    if constexpr (observed == observes::every_query && joins_rows_by<Scorer> == row_join::newest &&
                  !sampling_scorer<Scorer>)
      return (std::min)(tokens, 1);
    if constexpr (observed == observes::every_query || observed == observes::statistics) return tokens;
    if constexpr (observed == observes::window) return (std::min)(tokens, scorer.window);
    return 0;
  }
  static std::string observer() { return std::string(" (") + Scorer::name + " observes them)"; }

  /// The stage with the budget that `plan` gives it.
  auto planned(const stage_plan& plan) const {
    const auto with = [&](const auto& one) {
      return choosing_stage<Scorer, std::remove_cvref_t<decltype(one)>, Selector, Scope>{
          {}, scorer, one, selector, scope};
    };
    const auto fitted = [&](const auto& one) {
      if constexpr (requires { one.fitted(plan.prompt); }) {
        return with(one.fitted(plan.prompt));
      } else {
        return with(one);
      }
    };
    if constexpr (plans) {
      return fitted(budget.planned(plan));
    } else {
      return fitted(budget);
    }
  }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    Scorer::parameters(self.scorer, visit);
    Budget::parameters(self.budget, visit);
    Selector::parameters(self.selector, visit);
    if constexpr (has_parameters<Scope>) Scope::parameters(self.scope, visit);
  }
  template <class Visit>
  static void policies(const char* scorer_axis, Visit&& visit) {
    visit(scorer_axis, Scorer::name);
    visit("budget", Budget::name);
    visit("selector", Selector::name);
    if constexpr (!std::is_same_v<Scope, per_head>) visit("scope", Scope::name);
  }
};

/// Chooses the tokens that stay in memory. At the moments of the schedule all others are dropped.
template <class Scorer, class Budget, class Selector, class Scope = per_head>
struct retain : choosing_stage<Scorer, Budget, Selector, Scope> {
  static constexpr bool drops = true;
  static constexpr bool settles = choosing_stage<Scorer, Budget, Selector, Scope>::shares;
  template <class Visit>
  static void policies(Visit&& visit) {
    choosing_stage<Scorer, Budget, Selector, Scope>::policies("scorer", visit);
  }
};

/// Chooses the candidates that the steps of one turn may read. Everything stays stored, and the next turn chooses among
/// all of it. Tokens that are decoded in the turn are candidates too.
template <class Scorer, class Budget, class Selector, class Scope = per_head>
struct filter : choosing_stage<Scorer, Budget, Selector, Scope> {
  template <class Visit>
  static void policies(Visit&& visit) {
    choosing_stage<Scorer, Budget, Selector, Scope>::policies("filter scorer", visit);
  }
};

/// A first stage that keeps every token; steps may read all of them.
struct retain_all : first_stage_facts<> {
  index_t* tokens() const { return nullptr; }
  index_t queries_needed(index_t) const { return 0; }
  static std::string observer() { return ""; }
  void check() const {}
  void check_model(index_t, index_t) const {}
  stage_plan plan(index_t prompt) const { return {prompt, prompt, prompt, 1, prompt}; }
  stage_plan plan_unchecked(index_t prompt) const { return plan(prompt); }
  retain_all planned(const stage_plan&) const { return {}; }
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
  template <class Visit>
  static void policies(Visit&&) {}
};

/// Checks that `score_and_choose` can choose by a policy. A static assertion says what the policy lacks.
template <class Policy>
constexpr bool check_chooses() {
  constexpr bool chooses = requires { requires Policy::chooses; };
  static_assert(chooses,
                "tessera: score_and_choose takes a first stage that chooses: method.retain in place of the recipe; a "
                "method that keeps everything has none");
  if constexpr (chooses) {
    static_assert(!Policy::plans,
                  "tessera: this budget pays for two stages; pass what a plan leaves for the first one: "
                  "method.retain.planned(method.plan(prompt_tokens))");
  }
  return chooses;
}

/// How many sets of candidates the query heads of a group have: one for the group or, if they choose separately, one
/// per query head.
template <class Stage>
index_t reading_members([[maybe_unused]] const Stage& first, [[maybe_unused]] index_t group) {
  if constexpr (Stage::splits) {
    if (first.scope.by_query_head()) return group;
  }
  return 1;
}

/// Chooses the tokens that one decode step reads: a scorer ranks stored tokens by the step's queries, a selector
/// chooses `tokens` of them.
template <class Scorer, class Selector>
struct retrieve : second_stage_facts<Scorer, Selector> {
  using facts = second_stage_facts<Scorer, Selector>;
  using facts::budgets, facts::estimates;
  static_assert(check_scorer<Scorer>() && check_selector<Selector>());
  static_assert(has_parameters<Scorer> && has_parameters<Selector>,
                "tessera: a policy must show its run-time parameters: static void parameters(self, visit)");
  static_assert(Scorer::observed == observes::step,
                "tessera: retrieval needs a scorer that observes the decode step; this one ranks for retention");
  static_assert(!std::is_same_v<typename Selector::unit, page_unit> || paged_scorer<Scorer>,
                "tessera: whole pages need a scorer that scores pages; choose tokens or blocks");
  using scorer_type = Scorer;
  using selector_type = Selector;
  static constexpr value_range<index_t> answers{0, max_tokens};

  Scorer scorer{};
  Selector selector{};
  index_t tokens = 1024;  ///< per kv_head and step
  index_t max_new = 128;  ///< tokens that a turn decodes; they count into the length for which an estimate is planned

  /// Errors   those of `check_tokens`, and a scorer that does not fit the number of tokens that a step attends.
  /// `planned`: this number follows from the first stage's budget once the prompt's length is known.
  void check(bool planned, index_t attended, const char* budget_name, int k_dim) const {
    if (!planned) check_tokens(budget_name);
    scorer.check(attended);
    if constexpr (estimates) (void)scorer.fitted(1.0, k_dim);
    selector.check();
    if constexpr (requires { selector.check_budget(budget_name, tokens); }) {
      if (!planned) selector.check_budget(budget_name, tokens);
    }
  }
  /// The number of slots in a block whose mean key the scorer reads; 0: the scorer reads no means.
  index_t mean_block() const {
    if constexpr (requires { requires Scorer::reads_means; }) return selector.block;
    return 0;
  }

  /// Adds to a first stage's plan how many tokens a step reads of a head that stores what the first stage keeps.
  stage_plan plan(stage_plan first, index_t prompt) const {
    const index_t held = (std::min)(prompt, first.retained);
    first.capacity = index_t((std::min<offset_t>)(offset_t(held) + max_new, (std::numeric_limits<index_t>::max)()));
    first.read = attends();
    first.ratio = estimates ? (std::max)(1.0, double(first.capacity) / double(tokens)) : 1.0;
    return first;
  }
  index_t attends() const { return attended_of(tokens); }
  /// The tokens that a step attends under a budget. Also valid for a budget that both stages share.
  static index_t attended_of(index_t budget) { return estimates ? budget / 2 : budget; }

  /// This stage with the policies that `plan` fixes: the scorer's page and channels, and the selector's page size.
  retrieve planned(const stage_plan& plan, int k_dim) const {
    retrieve result = *this;
    if constexpr (estimates) result.scorer = scorer.fitted(plan.ratio, k_dim);
    if constexpr (std::is_same_v<typename Selector::unit, page_unit>) result.selector.page = result.scorer.page;
    result.tokens = plan.read;
    return result;
  }

  /// The budget is named `read_tokens` if a first stage has the name `budget`. It is no parameter if the first stage's
  /// budget pays for both stages.
  template <class Self, class Visit>
  static void parameters(Self& self, bool after_first_stage, bool planned, Visit&& visit) {
    if (after_first_stage && !planned)
      visit("read_tokens", self.tokens, budgets, "tokens that a step reads of each kv_head");
    if (estimates && !planned) {
      visit("max_new", self.max_new, answers, "tokens that a turn decodes: they count into the sequence's length");
    }
    Scorer::parameters(self.scorer, visit);
    Selector::parameters(self.selector, visit);
  }
  template <class Visit>
  static void policies(Visit&& visit) {
    visit("retrieve scorer", Scorer::name);
    visit("retrieve selector", Selector::name);
  }

 private:
  void check_tokens(const char* budget_name) const {
    if constexpr (estimates) {
      budgets.check(budget_name, tokens, "the token budget pays for estimating scores and for attending");
      answers.check("max_new", max_new, "pass how many tokens a turn decodes");
    } else {
      budgets.check(budget_name, tokens, "pass how many tokens a step may read");
    }
  }
};

/// A second stage in which every step reads all tokens that it may read.
struct retrieve_all : second_stage_facts<> {
  index_t tokens = 0;  ///< unused: nothing is chosen
  index_t attends() const { return 0; }
  static index_t attended_of(index_t) { return 0; }
  index_t mean_block() const { return 0; }
  void check(bool, index_t, const char*, int) const {}
  stage_plan plan(const stage_plan& first, index_t) const { return first; }
  retrieve_all planned(const stage_plan&, int) const { return {}; }
  template <class Self, class Visit>
  static void parameters(Self&, bool, bool, Visit&&) {}
  template <class Visit>
  static void policies(Visit&&) {}
};

TESSERA_NAMESPACE_END
