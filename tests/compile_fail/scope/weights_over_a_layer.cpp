// expect: tessera: weights are those of a kv_head's own values; take the scope per_head
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scope/per_layer.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/value_norm.hpp>
#include <tessera/scorer/weighted_by.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::weighted_by<tessera::observation_window, tessera::value_norm>, tessera::uniform,
                tessera::top_tokens, tessera::per_layer<tessera::over_heads::sum>>
    stage;
