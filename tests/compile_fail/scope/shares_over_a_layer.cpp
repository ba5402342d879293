// expect: tessera: a budget that gives each head a share of its own has nothing to give where all heads of a layer
#include <tessera/budget/calibrated.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scope/per_layer.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::observation_window, tessera::calibrated, tessera::top_tokens,
                tessera::per_layer<tessera::over_heads::sum>>
    stage;
