// A recipe's cache behind the interface of `any_cache`, and what the reference must know of the recipe.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <stdexcept>
#include <type_traits>

#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/pyramid.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/budget/wider_first.hpp>
#include <tessera/recipe.hpp>
#include <tessera/runtime/background.hpp>
#include <tessera/schedule/before_each_step.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/chosen_channels.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_blocks.hpp>
#include <tessera/selector/top_pages.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/selector/whole_blocks.hpp>

#include "layout/short_segments.hpp"
#include "methods/support/any_cache.hpp"

namespace methods_test {

using tessera::cache;
using tessera::model_shape;
using tessera::stage_plan;
namespace cpu = tessera::cpu;

/// What a recipe's policies are to the reference; `other` is a policy that it has no reference for.
template <class Scorer>
constexpr traits::first first_of() {
  if (std::is_same_v<Scorer, tessera::observation_window>) return traits::first::window;
  if (std::is_same_v<Scorer, tessera::accumulated_attention>) return traits::first::accumulated;
  if (std::is_same_v<Scorer, tessera::position>) return traits::first::position;
  return traits::first::other;
}

template <class Budget>
struct share_of {
  static constexpr bool plans = tessera::planning_budget<Budget>;
  static constexpr traits::share value = std::is_same_v<Budget, tessera::uniform>    ? traits::share::uniform
                                         : std::is_same_v<Budget, tessera::pyramid>  ? traits::share::pyramid
                                         : std::is_same_v<Budget, tessera::adaptive> ? traits::share::adaptive
                                                                                     : traits::share::other;
};
template <class Inner>
struct share_of<tessera::two_stage<Inner>> : share_of<Inner> {
  static constexpr bool plans = true;
};

/// Of one whose budget is what a step attends.
template <class Inner>
struct share_of<tessera::wider_first<Inner>> {
  static constexpr bool plans = false;
  static constexpr traits::share value = traits::share::other;
};

template <class Scorer>
constexpr traits::second second_of() {
  if (std::is_same_v<Scorer, tessera::exact_score>) return traits::second::exact;
  if (std::is_same_v<Scorer, tessera::hybrid_min_max>) return traits::second::hsa;
  if (std::is_same_v<Scorer, tessera::page_min_max>) return traits::second::quest;
  if (std::is_same_v<Scorer, tessera::chosen_channels>) return traits::second::sparq;
  return traits::second::other;
}

template <class Stage>
void describe_first(const Stage& stage, traits& found) {
  using scorer = std::remove_cvref_t<decltype(stage.scorer)>;
  using budget = std::remove_cvref_t<decltype(stage.budget)>;
  using selector = std::remove_cvref_t<decltype(stage.selector)>;
  found.scorer = first_of<scorer>();
  found.budget = share_of<budget>::value;
  found.plans = share_of<budget>::plans;
  found.blocks = std::is_same_v<selector, tessera::top_blocks>;
  if constexpr (requires { stage.scorer.window; }) found.window = stage.scorer.window;
  if constexpr (requires { stage.scorer.pool; }) found.pool = stage.scorer.pool;
  if (!found.blocks && !std::is_same_v<selector, tessera::top_tokens>) found.scorer = traits::first::other;
  if (tessera::joining_scope<std::remove_cvref_t<decltype(stage.scope)>>) found.scorer = traits::first::other;
}

template <class Recipe>
traits describe() {
  const Recipe recipe;
  traits found;
  if constexpr (Recipe::retain_type::chooses) describe_first(recipe.retain, found);
  found.segments = Recipe::needs_segments;
  found.step_segments = Recipe::needs_step_segments;
  found.rounds = tessera::packing_layout<typename Recipe::layout_type>;
  found.filters = Recipe::retain_type::chooses && !Recipe::retain_type::drops;
  found.by_layer = tessera::chooses_by_layer<Recipe>;
  found.each_step = std::is_same_v<typename Recipe::schedule_type, tessera::each_step>;
  found.before_step = std::is_same_v<typename Recipe::schedule_type, tessera::before_each_step>;
  if (!found.each_step && !found.before_step && !std::is_same_v<typename Recipe::schedule_type, tessera::once>)
    found.scorer = traits::first::other;  // a schedule that the reference does not know
  if constexpr (Recipe::retrieve_type::retrieves) {
    using selector = std::remove_cvref_t<decltype(recipe.retrieve.selector)>;
    found.reads = second_of<std::remove_cvref_t<decltype(recipe.retrieve.scorer)>>();
    found.pages = std::is_same_v<selector, tessera::top_pages>;
    found.whole_blocks = std::is_same_v<selector, tessera::whole_blocks>;
    found.estimate = Recipe::retrieve_type::estimates;
    const bool known = found.pages || std::is_same_v<selector, tessera::top_tokens> ||
                       std::is_same_v<selector, tessera::tokens_or_pages>;
    if (!known) found.reads = traits::second::other;
  }
  return found;
}

template <class Recipe>
Recipe configured(const settings& chosen) {
  Recipe recipe;
  if constexpr (tessera::packing_layout<typename Recipe::layout_type>) {  // the reference knows whole vectors
    auto& rows = recipe.layout.rows;
    if constexpr (requires { rows.key.channels; }) rows.key.channels = 1;
    if constexpr (requires { rows.value.channels; }) rows.value.channels = 1;
    if constexpr (requires { rows.basis.truncate; }) rows.basis.truncate = 0;
    support::shorten_segments(recipe, 32);
  }
  recipe.set_budget(chosen.budget);
  recipe.attention.rule = chosen.rule;
  support::set_numbers(recipe, chosen.values);
  if constexpr (Recipe::retain_type::chooses && Recipe::retrieve_type::retrieves && !Recipe::retain_type::plans)
    recipe.retrieve.tokens = chosen.count("read_tokens", chosen.budget);
  return recipe;
}

/// Searches on the calling thread: what is found is there before the next step, in every run.
struct found_at_once final : tessera::background {
  std::atomic<bool> stopping{false};
  void start(std::shared_ptr<tessera::background_task> task) override {
    task->perform(stopping);
    task->publish();
  }
};

/// A number for each head of a model, other ones for another `seed`; those lie somewhere for good.
inline tessera::share_table table_of(const model_shape& shape, index_t seed) {
  static std::map<std::vector<index_t>, std::vector<double>> all;
  std::vector<double>& table = all[{shape.layers, shape.kv_heads, seed}];
  for (index_t i = 0; table.size() < std::size_t(shape.layers * shape.kv_heads); ++i)
    table.push_back(0.05 + double((i * 37 + seed * 11) % 20) / 20 * 0.95);
  return {table.data(), shape.layers, shape.kv_heads};
}

/// By the value `profile`, where the recipe's heads have shares or classes of their own.
template <class Recipe>
void add_profile(Recipe& recipe, const settings& chosen, const model_shape& shape) {
  const index_t seed = chosen.count("profile", -1);
  if (seed < 0) return;
  if constexpr (requires { recipe.retain.budget.shares; }) recipe.retain.budget.shares = table_of(shape, seed);
  if constexpr (requires { recipe.retain.budget.gates; }) recipe.retain.budget.gates = table_of(shape, seed);
}

template <class Recipe>
class cache_of final : public support::cpu_calls<Recipe, any_cache> {
  using calls = support::cpu_calls<Recipe, any_cache>;
  using calls::held_;

 public:
  using calls::calls;
  using calls::decode;
  using typename calls::results;
  using typename calls::rows;
  std::unique_ptr<any_cache> clone() const override { return std::make_unique<cache_of>(*this); }
  void decode(index_t layer, const std::vector<index_t>& ids, const rows& q, const rows& k, const rows& v,
              const results& out, const results& lse) override {
    tessera::batch& step = steps_[ids];
    if (layer == 0 || step.tokens != q.tokens) step = calls::prepare_step(ids, q.tokens);
    held_.decode(layer, step, q, k, v, out, lse);
  }
  void overwrite(index_t layer, index_t id, index_t head, const std::vector<index_t>& but) override {
    const auto view = held_.view(layer, id);
    if constexpr (!requires { view.k; }) {
      throw std::logic_error("rows that are not plain cannot be overwritten");
    } else {
      using stored = std::remove_pointer_t<decltype(view.k)>;
      for (index_t slot = 0; slot < view.length(0, head); ++slot) {
        if (std::binary_search(but.begin(), but.end(), view.position(0, head, slot))) continue;
        std::fill_n(view.value(0, head, slot), dim, stored(1e20f));
        std::fill_n(view.key(0, head, slot), dim, stored(-1e20f));
      }
    }
  }
  offset_t full_bytes(index_t tokens) const override { return held_.full_bytes(tokens); }
  void trace_lines() override { held_.trace_lines(true); }
  tessera::prompt_lines lines(index_t layer, index_t id) const override { return held_.lines(layer, id); }

 private:
  std::map<std::vector<index_t>, tessera::batch> steps_;  // of each batch of ids, the last one
};

template <class Recipe>
entry entry_of(std::string name) {
  return {std::move(name), describe<Recipe>(), &support::numbers<Recipe>,
          [](const settings& chosen, const model_shape& shape, std::shared_ptr<cpu::executor> workers) {
            auto recipe = configured<Recipe>(chosen);
            add_profile(recipe, chosen, shape);
            cache<Recipe> made(support::called_shape<Recipe>(shape), recipe, std::move(workers));
            if constexpr (tessera::searching_layout<typename Recipe::layout_type>)
              made.search_on(std::make_shared<found_at_once>());
            return std::unique_ptr<any_cache>(new cache_of<Recipe>(std::move(made)));
          }};
}

}  // namespace methods_test
