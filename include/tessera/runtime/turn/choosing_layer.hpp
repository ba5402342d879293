// The layer whose choice a layer uses when a prompt ends.
#pragma once

#include "../../planned.hpp"
#include "../layer_roles.hpp"

TESSERA_NAMESPACE_BEGIN

/// The layer whose choice this one uses when a prompt ends: itself or, where the recipe's scope reuses choices, an
/// earlier one. Layers that do not follow the recipe are left out.
template <class Recipe>
index_t choosing_layer(index_t layer, const planned<Recipe>& policies, const layer_roles& roles) {
  if constexpr (Recipe::retain_type::reuses) {
    index_t order = 0;
    for (index_t earlier = 0; earlier < layer; ++earlier) order += roles.follows_recipe(earlier);
    for (index_t back = order - policies.first.scope.chooser(order); back > 0; back -= roles.follows_recipe(layer)) {
      --layer;
    }
  }
  return layer;
}

TESSERA_NAMESPACE_END
