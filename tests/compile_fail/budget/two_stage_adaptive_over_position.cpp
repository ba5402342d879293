// expect: tessera: a budget that compares heads needs a scorer whose scores are comparable across heads
#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::position, tessera::two_stage<tessera::adaptive>, tessera::top_tokens> chosen;
