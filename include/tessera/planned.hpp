// A recipe's policies, fitted to one conversation by its budget.
#pragma once

#include <utility>

#include "core/model_shape.hpp"
#include "recipe.hpp"

TESSERA_NAMESPACE_BEGIN

/// A recipe's placement, with the expected shares of heads and the sliding layers of the model.
template <class Recipe>
auto placement_of(const Recipe& recipe, const model_shape& shape) {
  auto result = recipe.placement;
  if constexpr (requires { result.sliding = shape.sliding; }) result.sliding = shape.sliding;
  if constexpr (requires { result.shares = recipe.retain.budget.shares; }) {
    result.shares = recipe.retain.budget.shares;
    result.whole_layers = recipe.dense_layers;
  }
  return result;
}

/// Whether a layer can be packed as soon as the prompt has ended in it: then nothing needs all layers, or the original
/// rows, at the end of the prompt.
template <class Recipe>
bool packs_by_layer(const Recipe& recipe) {
  constexpr bool packs = requires { requires Recipe::layout_type::rows_type::packs; };
  if (!packs || Recipe::retain_type::chooses) return false;
  return !Recipe::retrieve_type::retrieves || recipe.retrieve.mean_block() > 0;
}

/// Whether a layer chooses by what it stores and has observed itself, so that it can choose as soon as a prompt has
/// been through it.
template <class Recipe>
inline constexpr bool chooses_by_layer =
    Recipe::retain_type::chooses && !Recipe::retain_type::over_model && !Recipe::retain_type::reuses;

/// The policies of one conversation. They are made whenever a turn's prompt ends, or is announced; until then they are
/// those of a prompt of 0 tokens. All parts of a cache use these instead of the recipe's.
template <class Recipe>
struct planned {
  using retain_type = typename Recipe::retain_type;
  using retrieve_type = typename Recipe::retrieve_type;

  stage_plan plan;
  decltype(std::declval<retain_type>().planned(stage_plan{})) first;
  retrieve_type read;

  planned(const Recipe& recipe, index_t prompt) : planned(recipe, recipe.plan(prompt)) {}
  /// The policies of a plan that is known.
  planned(const Recipe& recipe, const stage_plan& given)
      : plan(given),
        first(recipe.retain.planned(given)),
        read(recipe.retrieve.planned(given, Recipe::layout_type::k_dim)) {}

  /// Adopts a changed budget of the recipe. A first stage with a budget of its own, and steps that read by exact
  /// scores, use it at once. A plan over both stages, or for an estimate of the keys, stays as it was.
  void follow(const Recipe& recipe) {
    stage_plan changed = plan;
    if (!retain_type::plans) {
      changed.retained = recipe.retain.plan(plan.retained).retained;
      if (!retrieve_type::estimates) changed.read = recipe.retrieve.plan(changed, changed.read).read;
    }
    *this = planned(recipe, changed);
  }

  /// Adopts budgets that grow within an answer. What the plan shares out over both stages stays as it was, and so do
  /// the page and the channels of an estimate.
  void follow_step(const Recipe& recipe) {
    if (retain_type::plans) return;
    stage_plan changed = plan;
    if (retain_type::chooses) changed.retained = recipe.retain.plan(plan.retained).retained;
    if (retrieve_type::retrieves) changed.read = recipe.retrieve.attends();
    *this = planned(recipe, changed);
  }
};

TESSERA_NAMESPACE_END
