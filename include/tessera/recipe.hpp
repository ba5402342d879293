// A recipe: one policy per axis, as a type. Combinations that make no sense do not compile (recipe_checks.hpp).
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "prefill/dense_prefill.hpp"
#include "recipe_checks.hpp"
#include "stages.hpp"

TESSERA_NAMESPACE_BEGIN

/// The policies of one cache. A published method derives from a recipe, adds its name and sets its paper's defaults.
template <class Retain, class Layout, class Retrieve, class Attention, class Schedule, class Prefill = dense_prefill>
struct recipe {
  static_assert(check_recipe<Retain, Layout, Retrieve, Attention, Schedule, Prefill>());
  using retain_type = Retain;
  using retrieve_type = Retrieve;
  using layout_type = Layout;
  using attention_type = Attention;
  using schedule_type = Schedule;
  using prefill_type = Prefill;
  static constexpr bool host_only = !runs_on_devices<Retain, Layout, Retrieve, Attention, Schedule, Prefill> ||
                                    !rows_fit_on_devices<Retain, Layout, Retrieve, Schedule, Prefill>;

  Retain retain{};
  Retrieve retrieve{};
  Attention attention{};
  Schedule schedule{};
  static constexpr value_range<index_t> layer_counts{0, 1 << 16};
  index_t dense_layers = 0;  ///< how many first layers keep and read everything
  Layout layout{};
  Prefill prefill{};
  typename Layout::placement_type placement{};

  /// The budgets that the recipe allows; none where everything is retained and read.
  static constexpr value_range<index_t> budgets = Retain::chooses ? Retain::budgets : Retrieve::budgets;

  /// The token budget per kv_head: of the first stage (or of both stages) if it has one, else of one step's reads.
  index_t budget() const { return retain.tokens() ? *retain.tokens() : retrieve.tokens; }
  void set_budget(index_t tokens) {
    if (index_t* own = retain.tokens()) {
      *own = tokens;
    } else if (Retrieve::retrieves) {
      retrieve.tokens = tokens;
    }
  }

  /// Throws tessera::error for parameters that are wrong, alone or together.
  void check() const {
    retain.check();
    retrieve.check(Retain::plans, Retain::plans ? Retrieve::attended_of(budget()) : retrieve.attends(),
                   Retain::chooses ? "read_tokens" : "budget", Layout::k_dim);
    layout.check(retrieve.mean_block());
    layer_counts.check("dense_layers", dense_layers, "pass how many layers stay whole");
    if constexpr (requires { schedule.check(); }) schedule.check();
    if constexpr (line_pattern<Prefill>) prefill.check();
    if constexpr (has_parameters<decltype(placement)>) check_parameters(placement);
  }

  /// The plan of a conversation that has taken `prompt` tokens when a turn's prompt ends.
  /// Errors   the first stage's window does not fit the plan: tessera::error.
  stage_plan plan(index_t prompt) const {
    const stage_plan first = retain.plan(prompt);
    return Retain::plans ? first : retrieve.plan(first, prompt);
  }

  /// The same without that error, for upper bounds over prompts of all lengths.
  stage_plan plan_unchecked(index_t prompt) const {
    const stage_plan first = retain.plan_unchecked(prompt);
    return Retain::plans ? first : retrieve.plan(first, prompt);
  }

  /// Whether prompts, and whether steps, need the boundaries of their segments.
  static constexpr bool needs_segments = Retain::needs_segments || Retrieve::needs_segments;
  static constexpr bool needs_step_segments = Retrieve::needs_segments;
  static constexpr bool needs_rope = Retain::needs_rope;

  /// How many of the last queries of a prompt chunk of `tokens` tokens the first stage's scorer, or the layout,
  /// observes.
  index_t queries_needed(index_t tokens) const {
    return (std::max)(retain.queries_needed(tokens), (std::min)(tokens, Layout::window));
  }
  void require_queries(index_t given, index_t tokens) const {
    const index_t needed = queries_needed(tokens);
    require(given >= needed && given <= tokens, "queries of a prompt chunk", given,
            value_range{needed, tokens}.text() + Retain::observer(), "pass the queries of the chunk's last tokens");
  }

  /// Calls `visit(name, reference, allowed, about)` for every run-time parameter of every policy. A name that two
  /// policies share is visited once for each, so that setting it by name sets both.
  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    Retain::parameters(self.retain, visit);
    Retrieve::parameters(self.retrieve, Retain::chooses, Retain::plans, visit);
    Layout::parameters(self.layout, [&](std::string_view name, auto& value, const auto& allowed, const char* about) {
      visit(Retrieve::estimates && name == "channels" ? "packed_channels" : name.data(), value, allowed, about);
    });
    if constexpr (has_parameters<Schedule>) Schedule::parameters(self.schedule, visit);
    if constexpr (line_pattern<Prefill>) Prefill::parameters(self.prefill, visit);
    visit("dense_layers", self.dense_layers, layer_counts, "so many of the first layers keep and read everything");
    if constexpr (has_parameters<decltype(placement)>) Layout::placement_type::parameters(self.placement, visit);
  }

  /// Calls `visit(axis, policy name)` for every axis.
  template <class Visit>
  static void policies(Visit&& visit) {
    Retain::policies(visit);
    Retrieve::policies(visit);
    Layout::policies(visit);
    visit("attention", Attention::name);
    visit("schedule", Schedule::name);
    if constexpr (line_pattern<Prefill>) visit("prefill", Prefill::name);
  }
};

TESSERA_NAMESPACE_END
