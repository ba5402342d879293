// expect: tessera: a budget that compares heads has nothing to compare where all heads of a layer keep the same
#include <tessera/budget/adaptive.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scope/per_layer.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::observation_window, tessera::adaptive, tessera::top_tokens,
                tessera::per_layer<tessera::over_heads::sum>>
    stage;
