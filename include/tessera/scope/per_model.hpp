// One threshold over all layers and heads of a model.
#pragma once

#include "../concepts/scope.hpp"

TESSERA_NAMESPACE_BEGIN

/// The best tokens of all layers' heads together stay, as many as the budget gives to all of them; so heads and layers
/// keep as many as win. Equal scores: the lower layer, then the lower head, then the lower slot stays first. Layers
/// that do not follow the recipe (dense or sliding ones) are left out.
/// Shapes   scores [layers, kv_heads, tokens] beside the tokens.   Cost  one pass over the scores of all layers.
struct per_model {
  static constexpr const char* name = "per_model";
  static constexpr bool over_model = true;
};

static_assert(check_scope<per_model>() && model_scope<per_model>);

TESSERA_NAMESPACE_END
