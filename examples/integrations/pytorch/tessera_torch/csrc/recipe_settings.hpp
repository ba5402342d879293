// A recipe's parameters by name and as text.
#pragma once

#include <algorithm>
#include <iterator>
#include <sstream>
#include <tessera/budget/two_stage.hpp>
#include <tessera/core/parameters.hpp>
#include <tessera/core/plan/share_table.hpp>
#include <tessera/planned.hpp>
#include <tessera/runtime/any/settings.hpp>
#include <type_traits>

#include "recipe_library.hpp"

namespace tessera_torch {

using tessera::split_factor;

/// Whether a layer can drop tokens as soon as the prompt has been through it.
template <class Recipe>
inline constexpr bool drops_by_layer =
    tessera::chooses_by_layer<Recipe> && Recipe::retain_type::drops && !Recipe::retain_type::rereads;

/// Whether a layer's choice depends on other layers, or on a number or a table of the model's layers.
template <class Recipe>
inline constexpr bool looks_over_layers =
    (Recipe::retain_type::chooses && !tessera::chooses_by_layer<Recipe>) || requires(Recipe r) {
      r.retain.budget.layers;
    } || requires(Recipe r) { r.retain.budget.gates; } || requires(Recipe r) { r.retain.budget.shares; };

template <class Value>
std::string text_of(const Value& value, const std::string& allowed) {
  if constexpr (std::is_enum_v<Value>) {
    return tessera::words_of(allowed)[std::size_t(value)];
  } else if constexpr (std::is_same_v<Value, split_factor>) {
    return value.adaptive ? "adaptive" : std::to_string(value.fixed);
  } else {
    std::ostringstream text;
    text << value;
    return text.str();
  }
}

/// One line a parameter: see tessera_torch_parameters.
template <class Recipe>
std::string parameters_text() {
  std::string all;
  const Recipe recipe;
  Recipe::parameters(recipe, [&](const char* name, const auto& value, const auto& allowed, const char* about) {
    all += std::string(name) + "\t" + text_of(value, allowed.text()) + "\t" + allowed.text() + "\t" + about + "\n";
  });
  return all;
}

/// Gives the recipe's budget the table of a model's heads. Errors: one for a recipe that takes none.
template <class Recipe>
void give_table(Recipe& recipe, const cache_request& request) {
  const tessera::share_table table{request.table->data(), request.shape.layers, request.shape.kv_heads};
  const auto heads = std::size_t(table.layers) * std::size_t(table.kv_heads);
  tessera::require(request.table->size() == heads, "numbers of the profile", request.table->size(),
                   "one for each kv_head of the model, " + std::to_string(heads), "pass the profile of this model");
  if constexpr (requires { recipe.retain.budget.gates; }) {
    recipe.retain.budget.gates = table;
  } else if constexpr (requires { recipe.retain.budget.shares; }) {
    recipe.retain.budget.shares = table;
  } else {
    tessera::fail("profile", "given", "none: this method takes no table of the model's heads", "leave it out");
  }
}

/// The recipe with what was asked for. Errors: an unknown parameter, a value that it may not have.
template <class Recipe>
Recipe requested(const cache_request& request) {
  Recipe recipe;
  tessera::set_parameters(recipe, request.settings);
  if (request.budget) recipe.set_budget(*request.budget);
  if (request.table) give_table(recipe, request);
  recipe.attention.rule = request.rule;
  recipe.check();
  return recipe;
}

}  // namespace tessera_torch
