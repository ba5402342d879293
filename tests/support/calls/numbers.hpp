// The numbers that a method is run with: what they may be, and setting them by their names.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <tessera/budget/two_stage.hpp>
#include <tessera/recipe.hpp>

namespace support {

/// One of them; the budget is another.
struct number {
  std::string name;
  double least, most, step;  // the next number that is refused lies a step beyond
};

template <class Recipe>
std::vector<number> numbers() {
  std::vector<number> all;
  if (Recipe::retain_type::chooses || Recipe::retrieve_type::retrieves)
    all.push_back({"budget", double(Recipe::budgets.least), double(Recipe::budgets.largest), 1});
  Recipe recipe;
  Recipe::parameters(recipe, [&](const char* name, auto& value, const auto& allowed, const char*) {
    using value_type = std::remove_reference_t<decltype(value)>;
    if (std::string_view(name) == "packed_channels") return;  // refused by the name that it has without an estimate
    if constexpr (std::is_same_v<value_type, tessera::split_factor>)
      all.push_back({name, allowed.fixed.least, allowed.fixed.largest, 1e-6});
    if constexpr (std::is_arithmetic_v<value_type>) {
      all.push_back({name, double(allowed.least), double(allowed.largest),
                     std::is_same_v<value_type, float> ? 1e-6 * std::max(1.0, double(allowed.largest)) : 1});
    }
  });
  return all;
}

/// Names that the recipe has not are passed over.
template <class Recipe>
void set_numbers(Recipe& recipe, const std::map<std::string, double>& values) {
  Recipe::parameters(recipe, [&](const char* name, auto& value, const auto&, const char*) {
    using value_type = std::remove_reference_t<decltype(value)>;
    const auto found = values.find(name);
    if (found == values.end()) return;
    if constexpr (std::is_same_v<value_type, tessera::split_factor>) {
      value = tessera::split_factor(found->second);
    } else if constexpr (std::is_same_v<value_type, float>) {
      value = float(found->second);
    } else {
      value = static_cast<value_type>(tessera::index_t(found->second));
    }
  });
}

}  // namespace support
