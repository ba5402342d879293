// A recipe: one policy per axis, as a type. Combinations that make no sense do not compile.
#pragma once

#include <algorithm>
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

/// What stays in memory: a scorer ranks, a budget counts, a selector chooses.
template <class Scorer, class Budget, class Selector>
struct retain {
  static_assert(check_scorer<Scorer>() && check_budget<Budget>() && check_selector<Selector>());
  static_assert(has_parameters<Scorer> && has_parameters<Budget> && has_parameters<Selector>,
                "tessera: a policy must show its run-time parameters: static void parameters(self, visit)");
  static_assert(
      Scorer::observed != observes::step,
      "tessera: a retained set cannot be chosen by a scorer that only sees one decode step; use it in retrieve");
  static_assert(!Budget::compares_heads || Scorer::comparable_across_heads,
                "tessera: a budget that compares heads needs a scorer whose scores are comparable across heads");
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
  using scorer_type = Scorer;
  using selector_type = Selector;

  Scorer scorer{};
  Selector selector{};
  index_t tokens = 1024;  ///< per kv_head and step
};

/// Every step reads everything that is stored.
struct retrieve_all {};

/// The policies of one cache. A published method derives from a recipe, adds its name and sets its paper's defaults.
template <class Retain, class Layout, class Retrieve, class Attention, class Schedule>
struct recipe {
  static constexpr bool retains = !std::is_same_v<Retain, retain_all>;
  static constexpr bool retrieves = !std::is_same_v<Retrieve, retrieve_all>;
  /// What the retaining scorer has to see.
  static constexpr observes observed = [] {
    if constexpr (retains) return Retain::scorer_type::observed;
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
  static_assert(retains || !Schedule::after_steps,
                "tessera: a schedule that fires after steps has nothing to do when everything is retained");
  static_assert(
      [] {
        if constexpr (retains && Schedule::after_steps) return Retain::scorer_type::observed != observes::window;
        return true;
      }(),
      "tessera: a scorer that observes the prompt's window learns nothing from decode steps; retain once");
  static_assert(
      [] {
        if constexpr (retains) return Layout::template accepts<typename Retain::selector_type::unit>;
        return true;
      }(),
      "tessera: this layout cannot store what the retaining selector chooses");

  Retain retain{};
  Retrieve retrieve{};
  Attention attention{};
  Schedule schedule{};

  /// The token budget per kv_head: of the retained set if anything is dropped, else of one step's reads.
  index_t budget() const {
    if constexpr (retains) return retain.budget.tokens;
    if constexpr (!retains && retrieves) return retrieve.tokens;
    return 0;
  }
  void set_budget(index_t tokens) {
    if constexpr (retains) retain.budget.tokens = tokens;
    if constexpr (!retains && retrieves) retrieve.tokens = tokens;
  }

  /// Throws tessera::error when parameters make no sense, alone or together.
  void check() const {
    if constexpr (retains) {
      retain.budget.check();
      retain.scorer.check(retain.budget.tokens);
      retain.selector.check();
    }
    if constexpr (retrieves) {
      require(retrieve.tokens >= 1, retains ? "read_tokens" : "budget", retrieve.tokens, "at least 1 token per kv_head",
              "pass how many tokens a step may read");
      retrieve.scorer.check(retrieve.tokens);
      retrieve.selector.check();
    }
  }

  /// How many of the last queries of a prompt chunk of `tokens` tokens the retaining scorer has to see.
  index_t queries_needed(index_t tokens) const {
    if constexpr (observed == observes::every_query) return tokens;
    if constexpr (observed == observes::window) return std::min(tokens, retain.scorer.window);
    return 0;
  }
  void require_queries(index_t given, index_t tokens) const {
    const index_t needed = queries_needed(tokens);
    std::string observer;
    if constexpr (retains) observer = std::string(" (") + Retain::scorer_type::name + " observes them)";
    require(given >= needed && given <= tokens, "queries of a prompt chunk", given,
            std::to_string(needed) + " to " + std::to_string(tokens) + observer,
            "pass the queries of the chunk's last tokens");
  }

  /// Calls `visit(name, reference, about)` for every run-time parameter of every policy; a name that
  /// two policies share comes twice and means both.
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    if constexpr (retains) {
      Retain::scorer_type::parameters(self.retain.scorer, visit);
      Retain::budget_type::parameters(self.retain.budget, visit);
      Retain::selector_type::parameters(self.retain.selector, visit);
    }
    if constexpr (retrieves) {
      // Where something is retained too, the budget is the retained set's and the step's has a name of its own.
      if constexpr (retains) visit("read_tokens", self.retrieve.tokens, "tokens that a step reads of each kv_head");
      Retrieve::scorer_type::parameters(self.retrieve.scorer, visit);
      Retrieve::selector_type::parameters(self.retrieve.selector, visit);
    }
  }

  /// Calls `visit(axis, policy name)` for every axis.
  template <class Visit>
  static void policies(Visit&& visit) {
    if constexpr (retains) {
      visit("scorer", Retain::scorer_type::name);
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
