// Shares go with scorers of every kind, with segments, with a second stage, and in chunks.
#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_chunk.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/by_segment.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/adaptive_blocks.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_tokens.hpp>

using namespace tessera;
recipe<retain<accumulated_attention, calibrated, top_tokens>, dense<bf16, 128>, retrieve_all, dense_decode, each_chunk>
    by_attention;
recipe<retain<key_norm, calibrated, top_tokens>, dense<bf16, 128>, retrieve_all, dense_decode, once> by_norm;
recipe<retain<by_segment<observation_window>, calibrated, adaptive_blocks>, dense<bf16, 128>, retrieve_all,
       dense_decode, each_chunk>
    in_blocks;
recipe<retain<observation_window, two_stage<calibrated>, top_tokens>, dense<bf16, 128>,
       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once>
    in_two_stages;
recipe<filter<observation_window, calibrated, top_tokens>, dense<bf16, 128>, retrieve<hybrid_min_max, tokens_or_pages>,
       gathered_decode, once>
    as_a_filter;
static_assert(runs_on_devices<decltype(by_attention), decltype(in_two_stages)>);
