// Parameters of a recipe as text: by name, as command lines and other languages have them.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <type_traits>

#include "../../core/error.hpp"
#include "../../core/host/host_vector.hpp"
#include "../../core/parameters.hpp"
#include "any_cache.hpp"

TESSERA_NAMESPACE_BEGIN

namespace detail {

template <class Number>
Number parsed_number(const named_setting& given, const std::string& allowed) {
  Number value{};
  const char* last = given.value.data() + given.value.size();
  const auto [end, problem] = std::from_chars(given.value.data(), last, value);
  require(end == last && problem == std::errc{}, given.name, "'" + given.value + "'", "a number, " + allowed,
          "pass " + given.name + "=NUMBER");
  return value;
}

template <class Value>
void assign_setting(const named_setting& given, const std::string& allowed, Value& to) {
  if constexpr (std::is_enum_v<Value>) {
    const auto words = words_of(allowed);
    const auto found = std::find(words.begin(), words.end(), given.value);
    require(found != words.end(), given.name, "'" + given.value + "'", allowed, "pass one of these words");
    to = Value(found - words.begin());
  } else if constexpr (requires { to.adaptive; }) {
    to = given.value == "adaptive" ? Value() : Value(parsed_number<double>(given, allowed));
  } else {
    to = parsed_number<Value>(given, allowed);
  }
}

}  // namespace detail

/// Sets parameters of a recipe by name.
/// Errors   an unknown parameter; a value that it may not have: tessera::error.
template <class Recipe, class Settings>
void set_parameters(Recipe& recipe, const Settings& settings) {
  for (const named_setting& given : settings) {
    bool known = false;
    std::string names;
    Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char* about) {
      names += (names.empty() ? "" : ", ") + std::string(name);
      if (given.name != name) return;
      detail::assign_setting(given, allowed.text(), value);
      allowed.check(name, value, std::string("it means: ") + about);
      known = true;
    });
    require(known, "parameter", "'" + given.name + "'", names.empty() ? "none" : names,
            "pass one that this recipe has");
  }
}

/// A recipe with what was asked for.
/// Errors   those of `set_parameters`; parameters that do not fit each other: tessera::error.
template <class Recipe>
Recipe recipe_of(const any_cache_request& request) {
  Recipe recipe;
  set_parameters(recipe, request.settings);
  if (request.budget) recipe.set_budget(*request.budget);
  recipe.attention.rule = request.rule;
  recipe.check();
  return recipe;
}

TESSERA_NAMESPACE_END
