// A recipe of the library and its parameters as text.
#pragma once

#include <tessera/recipe.hpp>
#include <vector>

#include "method_cache.hpp"
#include "values.hpp"

namespace tool {

template <class Recipe>
std::vector<parameter_info> parameters_of(const Recipe& recipe) {
  std::vector<parameter_info> all;
  Recipe::parameters(recipe, [&](const char* name, const auto& value, const auto& allowed, const char* about) {
    all.push_back({name, value_text(value), allowed.text(), about});
  });
  return all;
}

/// The recipe with its defaults and the settings over them.
template <class Recipe>
Recipe configured_recipe(const std::vector<setting>& settings) {
  Recipe recipe;
  for (const setting& given : settings) {
    bool known = false;
    Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char* about) {
      if (given.name != name) return;
      parse_value(given.name, given.value, allowed.text(), value);
      allowed.check(name, value, std::string("it means: ") + about);
      known = true;
    });
    if (!known) fail_unknown_parameter(given.name, Recipe::name, parameters_of(Recipe{}));
  }
  return recipe;
}

/// The recipe with the settings and the budget of a request.
template <class Recipe>
Recipe requested_recipe(const cache_request& request) {
  Recipe recipe = configured_recipe<Recipe>(request.settings);
  if (request.budget) recipe.set_budget(*request.budget);
  return recipe;
}

}  // namespace tool
