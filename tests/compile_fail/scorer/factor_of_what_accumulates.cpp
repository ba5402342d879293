// expect: tessera: scores that accumulate beside the tokens cannot be multiplied; take weighted_by
#include <tessera/budget/uniform.hpp>
#include <tessera/recipe.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/multiplied_by.hpp>
#include <tessera/scorer/value_length.hpp>
#include <tessera/selector/top_tokens.hpp>

tessera::retain<tessera::multiplied_by<tessera::accumulated_attention, tessera::value_length>, tessera::uniform,
                tessera::top_tokens>
    stage;
