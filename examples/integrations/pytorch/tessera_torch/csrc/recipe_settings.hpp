// A recipe's parameters by name and as text.
#pragma once

#include <algorithm>
#include <charconv>
#include <iterator>
#include <sstream>
#include <tessera/budget/two_stage.hpp>
#include <tessera/core/packed_row.hpp>
#include <tessera/core/units.hpp>
#include <tessera/math/pool.hpp>
#include <tessera/scorer/block_mean.hpp>
#include <tessera/scorer/by_segment.hpp>

#include "any_cache.hpp"

namespace tessera_torch {

using tessera::packed_element, tessera::pooling, tessera::row_reduction, tessera::segment_form, tessera::selection_unit,
    tessera::split_factor;

template <class Number>
Number parsed(const setting& given, const std::string& allowed) {
  Number value{};
  const char* last = given.value.data() + given.value.size();
  const auto [end, problem] = std::from_chars(given.value.data(), last, value);
  tessera::require(end == last && problem == std::errc{}, given.name, "'" + given.value + "'", "a number, " + allowed,
                   "pass " + given.name + "=NUMBER");
  return value;
}

/// The second word where it is given, else the first.
inline bool is_second(const setting& given, const char* first, const char* second) {
  tessera::require(given.value == first || given.value == second, given.name, "'" + given.value + "'",
                   std::string(first) + " or " + second, "pass one of the two as a string");
  return given.value == second;
}

inline void assign(const setting& given, const std::string& allowed, index_t& to) {
  to = parsed<index_t>(given, allowed);
}
inline void assign(const setting& given, const std::string& allowed, float& to) { to = parsed<float>(given, allowed); }
inline void assign(const setting& given, const std::string&, pooling& to) {
  to = is_second(given, "max", "average") ? pooling::average : pooling::max;
}
inline void assign(const setting& given, const std::string&, selection_unit& to) {
  to = is_second(given, "token", "page") ? selection_unit::page : selection_unit::token;
}
inline void assign(const setting& given, const std::string&, segment_form& to) {
  to = is_second(given, "product", "balance") ? segment_form::balance : segment_form::product;
}
inline void assign(const setting& given, const std::string&, row_reduction& to) {
  to = is_second(given, "sum", "max") ? row_reduction::max : row_reduction::sum;
}
constexpr const char* packed_elements[] = {"same", "bf16", "fp16", "fp8", "int4"};  // in the order of the values
inline void assign(const setting& given, const std::string& allowed, packed_element& to) {
  const auto* found = std::find(std::begin(packed_elements), std::end(packed_elements), given.value);
  tessera::require(found != std::end(packed_elements), given.name, "'" + given.value + "'", allowed,
                   "pass one of these");
  to = packed_element(found - packed_elements);
}
inline void assign(const setting& given, const std::string& allowed, split_factor& to) {
  to = given.value == "adaptive" ? split_factor() : split_factor(parsed<double>(given, allowed));
}

inline std::string text_of(pooling value) { return value == pooling::max ? "max" : "average"; }
inline std::string text_of(selection_unit value) { return value == selection_unit::token ? "token" : "page"; }
inline std::string text_of(segment_form value) { return value == segment_form::product ? "product" : "balance"; }
inline std::string text_of(row_reduction value) { return value == row_reduction::sum ? "sum" : "max"; }
inline std::string text_of(packed_element value) { return packed_elements[int(value)]; }
inline std::string text_of(split_factor value) { return value.adaptive ? "adaptive" : std::to_string(value.fixed); }
template <class Number>
std::string text_of(Number value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

/// One line a parameter: see tessera_torch_parameters.
template <class Recipe>
std::string parameters_text() {
  std::string all;
  const Recipe recipe;
  Recipe::parameters(recipe, [&](const char* name, const auto& value, const auto& allowed, const char* about) {
    all += std::string(name) + "\t" + text_of(value) + "\t" + allowed.text() + "\t" + about + "\n";
  });
  return all;
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
  recipe.attention.rule = request.rule;
  recipe.check();
  return recipe;
}

}  // namespace tessera_torch
