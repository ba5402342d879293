// expect: tessera: retrieval needs a scorer that observes the decode step; this one ranks for retention
#include <tessera/recipe.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retrieve<tessera::observation_window, tessera::top_tokens> chosen;
