// The settings of methods whose heads keep calibrated shares: which profile, and what is made of it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tessera/core/engine/head_groups.hpp>
#include <tessera/core/model_shape.hpp>
#include <tessera/planned.hpp>
#include <vector>

#include "profile_file.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// A recipe whose budget takes a table of shares.
template <class Recipe>
concept takes_profile = requires(Recipe& recipe) { recipe.retain.budget.shares; };

/// What stands beside a recipe's own parameters.
struct profile_settings {
  std::string file;             ///< empty: no profile, every head keeps the same
  std::optional<double> alpha;  ///< recomputes the budgets; else those of the profile stand
  tessera::index_t layer = 0;   ///< of the profile, where one layer is compressed alone
  bool fills = false;           ///< heads fill the pages that their group has anyway

  /// Takes those settings out of `given`. Errors: a value that a setting may not have; one that says
  /// something of a profile, without a profile.
  static profile_settings taken_from(std::vector<setting>& given);
  /// As a method's other parameters are shown; alpha as `profile` has it where it is not set.
  std::vector<parameter_info> shown(const tessera::profile* profile = nullptr) const;
};

/// The shares of a recipe, which must outlive its caches; null: there is no profile.
template <takes_profile Recipe>
std::shared_ptr<const tessera::profile> attach_profile(Recipe& recipe, const profile_settings& chosen,
                                                       const tessera::model_shape& shape) {
  if (chosen.file.empty()) return nullptr;
  auto kept = std::make_shared<tessera::profile>(read_profile(chosen.file));
  if (chosen.alpha) kept->set_alpha(*chosen.alpha);
  auto& shares = recipe.retain.budget.shares;
  shares = shape.layers == 1 ? kept->shares(chosen.layer) : kept->shares();
  recipe.retain.budget.check_model(shape.layers, shape.kv_heads);
  if constexpr (requires { tessera::placement_of(recipe, shape).groups(1, 1); }) {
    const std::size_t first = std::size_t(shares.data - kept->budget.data());
    const std::vector<double> own(shares.data, shares.data + std::size_t(shares.layers) * std::size_t(shares.kv_heads));
    const std::vector<double> all =
        chosen.fills ? std::vector<double>(tessera::filled_shares(
                           tessera::placement_of(recipe, shape).groups(shape.layers, shape.kv_heads), own))
                     : own;
    std::copy(all.begin(), all.end(), kept->budget.begin() + std::ptrdiff_t(first));
  }
  return kept;
}

}  // namespace tool
