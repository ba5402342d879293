// expect: tessera: one threshold over the model needs the scores of all layers at once, comparable across heads
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scope/per_model.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_tokens, tessera::per_model> stage;
