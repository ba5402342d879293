// expect: tessera: a budget that gives shares of a prompt has none to give in steps; use once or each_chunk
#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/calibrated.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<accumulated_attention, calibrated, top_tokens>, dense<bf16, 128>, retrieve_all, dense_decode, each_step>
    chosen;
