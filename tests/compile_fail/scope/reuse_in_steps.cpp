// expect: tessera: layers that keep another one's choice choose when a prompt ends, not in steps; use once
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/scope/per_layers.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<accumulated_attention, uniform, top_tokens, per_layers<over_heads::sum>>, dense<fp32, 64>, retrieve_all,
       dense_decode, each_step>
    kept;
