// How many ragged pages a prompt needs under a recipe, for the caches of both backends.
#pragma once

#include "../core/host/host_vector.hpp"
#include "../planned.hpp"
#include "layer_roles.hpp"
#include "page_plan.hpp"

TESSERA_NAMESPACE_BEGIN

/// The pages that a prompt of `tokens` tokens needs of a pool of ragged pages. Chunks end at multiples of the
/// schedule's chunk length. If a first stage drops tokens only at the end of a prompt, `final_pages` counts the pages
/// before that drop.
/// Shapes   stored [layers, kv_heads], tokens of each head before the prompt.
template <class Recipe>
page_plan plan_prompt_pages(const head_groups& groups, index_t page, const host_vector<index_t>& stored,
                            [[maybe_unused]] const Recipe& recipe, [[maybe_unused]] const planned<Recipe>& policies,
                            const layer_roles& roles, index_t tokens) {
  coming_prompt prompt{tokens};
  if constexpr (Recipe::retain_type::settles) {
    prompt.window = policies.first.scorer.protected_tail(policies.first.budget.tokens);
    if constexpr (requires { recipe.schedule.chunk; }) {
      if (policies.first.budget.knows_shares()) prompt.chunk = recipe.schedule.chunk;
    }
  }
  const auto share = [&](index_t layer, index_t head, index_t seen) {
    if constexpr (Recipe::retain_type::settles)
      return policies.first.budget.share({layer, groups.layers, head, groups.kv_heads, 0, seen});
    return seen;
  };
  return plan_pages(
      groups, page, stored, prompt, share, [&](index_t layer) { return !roles.follows_recipe(layer); },
      [&](index_t layer) { return roles.window(layer); });
}

TESSERA_NAMESPACE_END
