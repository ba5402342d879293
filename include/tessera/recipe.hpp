// A recipe: one policy per axis, as a type. Combinations that make no sense do not compile.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "concepts/attention.hpp"
#include "concepts/budget.hpp"
#include "concepts/layout.hpp"
#include "concepts/schedule.hpp"
#include "concepts/scorer.hpp"
#include "concepts/selector.hpp"
#include "core/error.hpp"
#include "core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

/// What `retain` and `filter` ask of their policies.
template <class Scorer, class Budget, class Selector>
constexpr bool check_first_stage() {
  static_assert(check_scorer<Scorer>() && check_budget<Budget>() && check_selector<Selector>());
  static_assert(has_parameters<Scorer> && has_parameters<Budget> && has_parameters<Selector>,
                "tessera: a policy must show its run-time parameters: static void parameters(self, visit)");
  static_assert(
      Scorer::observed != observes::step,
      "tessera: a retained set cannot be chosen by a scorer that only sees one decode step; use it in retrieve");
  static_assert(!Budget::compares_heads || Scorer::comparable_across_heads,
                "tessera: a budget that compares heads needs a scorer whose scores are comparable across heads");
  static_assert(!std::is_same_v<typename Selector::unit, page_unit>,
                "tessera: whole pages cannot meet a head's count exactly; choose them in retrieve");
  return true;
}

}  // namespace detail

/// What stays in memory: a scorer ranks, a budget counts, a selector chooses.
template <class Scorer, class Budget, class Selector>
struct retain {
  static_assert(detail::check_first_stage<Scorer, Budget, Selector>());
  using scorer_type = Scorer;
  using budget_type = Budget;
  using selector_type = Selector;

  Scorer scorer{};
  Budget budget{};
  Selector selector{};
};

/// What the steps of one turn may read: chosen as `retain` chooses, but everything stays stored, and the next turn chooses
/// anew from all of it. Tokens that are decoded in the turn join what was let through.
template <class Scorer, class Budget, class Selector>
struct filter {
  static_assert(detail::check_first_stage<Scorer, Budget, Selector>());
  using scorer_type = Scorer;
  using budget_type = Budget;
  using selector_type = Selector;

  Scorer scorer{};
  Budget budget{};
  Selector selector{};
};

/// Everything stays.
struct retain_all {};

/// What one decode step reads: a scorer ranks what is stored by the step's queries, a selector chooses `tokens` of it.
template <class Scorer, class Selector>
struct retrieve {
  static_assert(check_scorer<Scorer>() && check_selector<Selector>());
  static_assert(has_parameters<Scorer> && has_parameters<Selector>,
                "tessera: a policy must show its run-time parameters: static void parameters(self, visit)");
  static_assert(Scorer::observed == observes::step,
                "tessera: retrieval needs a scorer that observes the decode step; this one ranks for retention");
  static_assert(!std::is_same_v<typename Selector::unit, page_unit> || paged_scorer<Scorer>,
                "tessera: whole pages need a scorer that scores pages; choose tokens or blocks");
  using scorer_type = Scorer;
  using selector_type = Selector;
  /// Whether `tokens` pay for an estimate too: then a step attends half of them.
  static constexpr bool estimates = paged_scorer<Scorer>;
  static constexpr value_range<index_t> budgets = estimates ? estimating_budgets : token_budgets;
  static constexpr value_range<index_t> answers{0, most_tokens};

  Scorer scorer{};
  Selector selector{};
  index_t tokens = 1024;  ///< per kv_head and step
  index_t max_new = 128;  ///< tokens that a turn decodes, for the length that an estimate is planned for

  /// For a head that holds `stored` tokens when the first prompt has ended.
  stage_plan plan(index_t stored) const {
    stage_plan result;
    result.retained = stored;
    result.capacity = index_t(std::min<offset_t>(offset_t(stored) + max_new, std::numeric_limits<index_t>::max()));
    result.read = estimates ? tokens / 2 : tokens;
    result.ratio = estimates ? std::max(1.0, double(result.capacity) / double(tokens)) : 1.0;
    return result;
  }

  void check(const char* budget_name) const {
    if constexpr (estimates) {
      budgets.check(budget_name, tokens, "the token budget pays for estimating scores and for attending");
      answers.check("max_new", max_new, "pass how many tokens a turn decodes");
    } else {
      budgets.check(budget_name, tokens, "pass how many tokens a step may read");
    }
  }
};

/// Every step reads everything that is stored.
struct retrieve_all {};

namespace detail {

template <class Stage>
inline constexpr bool is_filter = false;
template <class Scorer, class Budget, class Selector>
inline constexpr bool is_filter<filter<Scorer, Budget, Selector>> = true;

}  // namespace detail

/// The policies of one cache. A published method derives from a recipe, adds its name and sets its paper's defaults.
template <class Retain, class Layout, class Retrieve, class Attention, class Schedule>
struct recipe {
  /// Whether a first stage chooses at all; whether it drops what it does not choose (retains) or only hides it (filters).
  static constexpr bool chooses = !std::is_same_v<Retain, retain_all>;
  static constexpr bool filters = detail::is_filter<Retain>;
  static constexpr bool retains = chooses && !filters;
  static constexpr bool retrieves = !std::is_same_v<Retrieve, retrieve_all>;
  /// Whether one token budget is split over both stages.
  static constexpr bool plans = [] {
    if constexpr (chooses) return planning_budget<typename Retain::budget_type>;
    return false;
  }();
  /// Whether a step reads an estimate of the keys, in pages.
  static constexpr bool estimates = [] {
    if constexpr (retrieves) return Retrieve::estimates;
    return false;
  }();
  /// What the first stage's scorer has to see.
  static constexpr observes observed = [] {
    if constexpr (chooses) return Retain::scorer_type::observed;
    return observes::nothing;
  }();
  using retain_type = Retain;
  using retrieve_type = Retrieve;
  using layout_type = Layout;
  using schedule_type = Schedule;

  static_assert(check_layout<Layout>() && check_attention<Attention>() && check_schedule<Schedule>());
  static_assert(retrieves == Attention::gathers,
                "tessera: a recipe that retrieves needs an attention that gathers, and one that does not needs an "
                "attention that reads everything");
  static_assert(chooses || !Schedule::after_steps,
                "tessera: a schedule that fires after steps has nothing to do when everything is retained");
  static_assert(!filters || !Schedule::after_steps,
                "tessera: a filter is chosen when a turn's prompt ends, not after steps; use once");
  static_assert(!plans || retrieves,
                "tessera: a budget over two stages needs a second stage; add retrieve, or take a budget of one stage");
  static_assert(
      [] {
        if constexpr (chooses && Schedule::after_steps) return Retain::scorer_type::observed != observes::window;
        return true;
      }(),
      "tessera: a scorer that observes the prompt's window learns nothing from decode steps; retain once");
  static_assert(
      [] {
        if constexpr (chooses) return Layout::template accepts<typename Retain::selector_type::unit>;
        return true;
      }(),
      "tessera: this layout cannot store what the retaining selector chooses");

  Retain retain{};
  Retrieve retrieve{};
  Attention attention{};
  Schedule schedule{};

  /// What the budget may be; nothing counts tokens where everything is retained and read.
  static constexpr value_range<index_t> budgets = [] {
    if constexpr (chooses) {
      if constexpr (requires { Retain::budget_type::budgets; }) return Retain::budget_type::budgets;
      if constexpr (!requires { Retain::budget_type::budgets; }) return token_budgets;
    }
    if constexpr (!chooses && retrieves) return Retrieve::budgets;
    return value_range<index_t>{0, 0};
  }();

  /// The token budget per kv_head: of the first stage (or of both) if there is one, else of one step's reads.
  index_t budget() const {
    if constexpr (chooses) return retain.budget.tokens;
    if constexpr (!chooses && retrieves) return retrieve.tokens;
    return 0;
  }
  void set_budget(index_t tokens) {
    if constexpr (chooses) retain.budget.tokens = tokens;
    if constexpr (!chooses && retrieves) retrieve.tokens = tokens;
  }

  /// Throws tessera::error when parameters make no sense, alone or together.
  void check() const {
    if constexpr (chooses) {
      retain.budget.check();
      // What a plan leaves for the first stage is known once the prompt is: see `plan`.
      retain.scorer.check(plans ? std::numeric_limits<index_t>::max() : retain.budget.tokens);
      retain.selector.check();
    }
    if constexpr (retrieves) {
      if constexpr (!plans) retrieve.check(chooses ? "read_tokens" : "budget");
      retrieve.scorer.check(plans ? budget() / 2 : retrieve.plan(0).read);
      if constexpr (estimates) retrieve.scorer.fitted(1.0, Layout::k_dim);
      retrieve.selector.check();
    }
  }

  /// What the budget comes to in a conversation whose first prompt has `prompt` tokens.
  /// Errors   a plan that leaves no room for the first stage's window: tessera::error.
  stage_plan plan(index_t prompt) const {
    stage_plan result;
    if constexpr (plans) {
      result = retain.budget.plan(prompt);
      const index_t window = std::min(retain.scorer.protected_tail(std::max(0, result.retained)), prompt);
      require(result.retained >= window, "max_new", retain.budget.max_new,
              "a number that leaves room for the window of " + std::to_string(window) + " tokens: with a prompt of " +
                  std::to_string(prompt) + " the first stage keeps " + std::to_string(result.retained),
              "raise the budget or max_new, or lower the window");
    } else {
      result.retained = result.capacity = result.read = prompt;
      if constexpr (chooses) result.retained = retain.budget.tokens;
      if constexpr (retrieves) {
        const index_t kept = result.retained;
        result = retrieve.plan(std::min(prompt, kept));
        result.retained = kept;
      }
    }
    return result;
  }

  /// The first stage as `plan` has it: `retain`, with a budget of one stage; `retain_all` where there is none.
  auto first_stage([[maybe_unused]] const stage_plan& plan) const {
    if constexpr (!chooses) {
      return retain_all{};
    } else {
      const auto budget = [&] {
        if constexpr (plans) return this->retain.budget.planned(plan);
        if constexpr (!plans) return this->retain.budget;
      }();
      return tessera::retain<typename Retain::scorer_type, std::remove_cv_t<decltype(budget)>,
                             typename Retain::selector_type>{this->retain.scorer, budget, this->retain.selector};
    }
  }

  /// The second stage's scorer as `plan` has it: page and channels set.
  auto step_scorer(const stage_plan& plan) const {
    if constexpr (estimates) {
      return retrieve.scorer.fitted(plan.ratio, Layout::k_dim);
    } else {
      return retrieve.scorer;
    }
  }
  /// The second stage's selector, with the scorer's page where it chooses whole ones.
  auto step_selector(const stage_plan& plan) const {
    auto selector = retrieve.selector;
    if constexpr (std::is_same_v<typename Retrieve::selector_type::unit, page_unit>) {
      selector.page = step_scorer(plan).page;
    }
    return selector;
  }

  /// How many of the last queries of a prompt chunk of `tokens` tokens the first stage's scorer has to see.
  index_t queries_needed(index_t tokens) const {
    if constexpr (observed == observes::every_query) return tokens;
    if constexpr (observed == observes::window) return std::min(tokens, retain.scorer.window);
    return 0;
  }
  void require_queries(index_t given, index_t tokens) const {
    const index_t needed = queries_needed(tokens);
    std::string observer;
    if constexpr (chooses) observer = std::string(" (") + Retain::scorer_type::name + " observes them)";
    require(given >= needed && given <= tokens, "queries of a prompt chunk", given,
            value_range{needed, tokens}.text() + observer,
            "pass the queries of the chunk's last tokens");
  }

  /// Calls `visit(name, reference, allowed, about)` for every run-time parameter of every policy; a name that
  /// two policies share comes twice and means both.
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    if constexpr (chooses) {
      Retain::scorer_type::parameters(self.retain.scorer, visit);
      Retain::budget_type::parameters(self.retain.budget, visit);
      Retain::selector_type::parameters(self.retain.selector, visit);
    }
    if constexpr (retrieves) {
      // Where a first stage chooses too, the budget is its own and the step's has a name of its own.
      if constexpr (chooses && !plans)
        visit("read_tokens", self.retrieve.tokens, Retrieve::budgets, "tokens that a step reads of each kv_head");
      if constexpr (estimates && !plans)
        visit("max_new", self.retrieve.max_new, Retrieve::answers,
              "tokens that a turn decodes: they count into the sequence's length");
      Retrieve::scorer_type::parameters(self.retrieve.scorer, visit);
      Retrieve::selector_type::parameters(self.retrieve.selector, visit);
    }
  }

  /// Calls `visit(axis, policy name)` for every axis.
  template <class Visit>
  static void policies(Visit&& visit) {
    if constexpr (chooses) {
      visit(filters ? "filter scorer" : "scorer", Retain::scorer_type::name);
      visit("budget", Retain::budget_type::name);
      visit("selector", Retain::selector_type::name);
    }
    if constexpr (retrieves) {
      visit("retrieve scorer", Retrieve::scorer_type::name);
      visit("retrieve selector", Retrieve::selector_type::name);
    }
    visit("layout", Layout::name);
    visit("attention", Attention::name);
    visit("schedule", Schedule::name);
  }
};

TESSERA_NAMESPACE_END
