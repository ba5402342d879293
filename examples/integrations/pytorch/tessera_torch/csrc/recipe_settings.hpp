// A recipe's parameters by name and as text.
#pragma once

#include <algorithm>
#include <charconv>
#include <iterator>
#include <sstream>
#include <tessera/budget/two_stage.hpp>
#include <tessera/core/parameters.hpp>
#include <tessera/core/plan/share_table.hpp>
#include <tessera/planned.hpp>
#include <type_traits>

#include "any_cache.hpp"

namespace tessera_torch {

using tessera::split_factor;

/// Whether a layer can drop tokens as soon as the prompt has been through it.
template <class Recipe>
inline constexpr bool drops_by_layer =
    tessera::chooses_by_layer<Recipe> && Recipe::retain_type::drops && !Recipe::retain_type::rereads;

/// Ends a prompt in one layer, which has its rows already. What cannot be chosen there, end_prompt says when every layer has them.
template <class Call>
void end_where_it_can(const Call& call) {
  try {
    call();
  } catch (const tessera::error&) {
  }
}

template <class Number>
Number parsed(const setting& given, const std::string& allowed) {
  Number value{};
  const char* last = given.value.data() + given.value.size();
  const auto [end, problem] = std::from_chars(given.value.data(), last, value);
  tessera::require(end == last && problem == std::errc{}, given.name, "'" + given.value + "'", "a number, " + allowed,
                   "pass " + given.name + "=NUMBER");
  return value;
}

inline void assign(const setting& given, const std::string& allowed, index_t& to) {
  to = parsed<index_t>(given, allowed);
}
inline void assign(const setting& given, const std::string& allowed, float& to) { to = parsed<float>(given, allowed); }
inline void assign(const setting& given, const std::string& allowed, split_factor& to) {
  to = given.value == "adaptive" ? split_factor() : split_factor(parsed<double>(given, allowed));
}

/// A word of an enumeration.
template <class Word>
requires std::is_enum_v<Word> void assign(const setting& given, const std::string& allowed, Word& to) {
  const auto words = tessera::words_of(allowed);
  const auto found = std::find(words.begin(), words.end(), given.value);
  tessera::require(found != words.end(), given.name, "'" + given.value + "'", allowed, "pass one of these as a string");
  to = Word(found - words.begin());
}

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
  for (const setting& given : request.settings) {
    bool known = false;
    std::string names;
    Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char* about) {
      names += (names.empty() ? "" : ", ") + std::string(name);
      if (given.name != name) return;
      assign(given, allowed.text(), value);
      allowed.check(name, value, std::string("it means: ") + about);
      known = true;
    });
    tessera::require(known, "parameter", "'" + given.name + "'", names, "pass one that this recipe has");
  }
  if (request.budget) recipe.set_budget(*request.budget);
  if (request.table) give_table(recipe, request);
  recipe.attention.rule = request.rule;
  recipe.check();
  return recipe;
}

}  // namespace tessera_torch
