// expect: tessera: a schedule that fires when a chunk ends needs a first stage that drops tokens by shares
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_chunk.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<observation_window, uniform, top_tokens>, dense<bf16, 128>, retrieve_all, dense_decode, each_chunk>
    chosen;
