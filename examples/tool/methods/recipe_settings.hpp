// A recipe of the library and its parameters as text.
#pragma once

#include <algorithm>
#include <concepts>
#include <memory>
#include <tessera/recipe.hpp>
#include <tessera/tailed_rows.hpp>
#include <vector>

#include "method_cache.hpp"
#include "tool/heads/gates.hpp"
#include "tool/profile/profile_settings.hpp"
#include "tool/rows/row_settings.hpp"
#include "values.hpp"

namespace tool {

/// A recipe whose budget classes heads by a table that lies in a file.
template <class Recipe>
concept takes_gates = requires(Recipe recipe) {
  { recipe.retain.budget.gates } -> std::same_as<tessera::share_table&>;
};

/// Those settings of a recipe, taken out of `given`.
/// Errors: as of `taken_from`; rotated rows under a method that goes by the channels that the model gives.
template <class Recipe>
row_settings row_settings_of(std::vector<setting>& given) {
  const row_settings chosen = row_settings::taken_from(given);
  const char* why = nullptr;
  if (Recipe::needs_rope) why = "turns queries by the model's RoPE";
  if (tessera::chooses_among_channels<typename Recipe::layout_type>) {
    why = "chooses among channels itself";
    tessera::require(chosen.whole_tail == 0, "whole_tail", chosen.whole_tail, std::string("0 under ") + Recipe::name,
                     "leave it out: the method packs its rows itself");
  }
  if constexpr (Recipe::retain_type::chooses) {
    if (tessera::weighted_scorer<typename Recipe::retain_type::scorer_type>) why = "weighs values by their channels";
  }
  tessera::require(!chosen.rotates || !why, "rotate", "hadamard",
                   std::string("none under ") + Recipe::name + ", which " + (why ? why : ""), "leave it out");
  return chosen;
}

template <class Recipe>
std::vector<parameter_info> parameters_of(const Recipe& recipe) {
  std::vector<parameter_info> all;
  if constexpr (takes_gates<Recipe>) {
    all.push_back({"profile", gates_source(recipe.retain.budget.gates), "a file", "gates of the model's heads"});
  }
  Recipe::parameters(recipe, [&](const char* name, const auto& value, const auto& allowed, const char* about) {
    const auto same = [&](const parameter_info& known) { return known.name == name; };
    if (std::any_of(all.begin(), all.end(), same)) return;  // two policies that --set gives the same value
    all.push_back({name, value_text(value, allowed.text()), allowed.text(), about});
  });
  return all;
}

/// Those, and what stands beside them, which `settings` say.
template <class Recipe>
std::vector<parameter_info> shown_parameters(const Recipe& recipe, std::vector<setting> settings,
                                             [[maybe_unused]] bool read = false) {
  std::vector<parameter_info> all = parameters_of(recipe);
  for (parameter_info& one : row_settings_of<Recipe>(settings).shown()) all.push_back(std::move(one));
  if constexpr (takes_profile<Recipe>) {
    const profile_settings chosen = profile_settings::taken_from(settings);
    std::optional<tessera::profile> profile;
    if (read && !chosen.file.empty()) profile = read_profile(chosen.file);
    for (parameter_info& one : chosen.shown(profile ? &*profile : nullptr)) all.push_back(std::move(one));
  }
  return all;
}

/// The recipe with its defaults and the settings over them.
template <class Recipe>
Recipe configured_recipe(std::vector<setting> settings) {
  Recipe recipe;
  (void)row_settings_of<Recipe>(settings);
  if constexpr (takes_profile<Recipe>) (void)profile_settings::taken_from(settings);
  for (const setting& given : settings) {
    bool known = false;
    Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char* about) {
      if (given.name != name) return;
      parse_value(given.name, given.value, allowed.text(), value);
      allowed.check(name, value, std::string("it means: ") + about);
      known = true;
    });
    if constexpr (takes_gates<Recipe>) {
      if (given.name == "profile") {
        recipe.retain.budget.gates = load_gates(given.value);
        known = true;
      }
    }
    if (!known) fail_unknown_parameter(given.name, Recipe::name, shown_parameters(Recipe{}, {}));
  }
  return recipe;
}

/// The recipe with settings and budget.
template <class Recipe>
Recipe requested_recipe(const std::vector<setting>& settings, std::optional<index_t> budget) {
  Recipe recipe = configured_recipe<Recipe>(settings);
  if (budget) recipe.set_budget(*budget);
  if constexpr (takes_gates<Recipe>) {
    tessera::require(recipe.retain.budget.gates.data, "profile", "missing", "a file of the gates of the model's heads",
                     "make one with `tessera heads` and pass it: --set profile=FILE");
  }
  return recipe;
}

/// The recipe of a request, how its rows are stored, and the profile that its shares lie in, which must outlive its
/// caches.
template <class Recipe>
struct recipe_with_profile {
  Recipe recipe;
  row_settings rows;
  std::shared_ptr<const tessera::profile> profile;

  explicit recipe_with_profile(const cache_request& request)
      : recipe(requested_recipe<Recipe>(request.settings, request.budget)) {
    std::vector<setting> settings = request.settings;
    rows = row_settings_of<Recipe>(settings);
    if constexpr (takes_profile<Recipe>) {
      profile = attach_profile(recipe, profile_settings::taken_from(settings), request.shape);
    }
  }
};

/// A recipe that compresses a prompt while it comes in.
template <class Recipe>
inline constexpr bool fuses_chunks = Recipe::schedule_type::fires_at(tessera::moment::chunk_end);

/// The recipe with what its plan for a first prompt sets: page, channels and split in place of "by the budget".
template <class Recipe>
Recipe planned_recipe(Recipe recipe, index_t prompt, int head_dim) {
  if constexpr (Recipe::retrieve_type::estimates) {
    recipe.retrieve.scorer = recipe.retrieve.scorer.fitted(recipe.plan(prompt).ratio, head_dim);
  }
  if constexpr (requires { recipe.retain.budget.split; }) {
    auto& budget = recipe.retain.budget;
    const double all = double(prompt) + double(budget.max_new);
    budget.split = tessera::split_factor(budget.split.exponent(std::max(1.0, all / double(budget.tokens))));
  }
  return recipe;
}

/// What a recipe's budget counts, in words.
template <class Recipe>
const char* budget_counts() {
  if (Recipe::retain_type::plans && !Recipe::retrieve_type::estimates)
    return "tokens that a step reads; several times as many stay";
  if (Recipe::retain_type::plans)
    return "tokens' worth of reading a step: half is attended, half pays for the estimate; splits both stages";
  if (Recipe::retain_type::chooses)
    return !Recipe::retain_type::drops ? "tokens that a turn may read" : "tokens that stay";
  if (Recipe::retrieve_type::estimates)
    return "tokens' worth of reading a step: half is attended, half pays for the estimate";
  return Recipe::retrieve_type::retrieves ? "tokens that a step reads" : "nothing";
}

}  // namespace tool
