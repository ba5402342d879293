// expect: tessera: a budget over two stages is planned when a prompt ends, not while it comes in; use once
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_chunk.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<observation_window, two_stage<calibrated>, top_tokens>, dense<bf16, 128>,
       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, each_chunk>
    chosen;
