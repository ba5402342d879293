// Mixtures of policies that no paper has: any first stage with any second, by changing a type.
#pragma once

#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/think.hpp>
#include <tessera/prefill/covering_lines.hpp>
#include <tessera/prefill/vertical_slash.hpp>
#include <tessera/schedule/before_each_step.hpp>
#include <tessera/schedule/every_outputs.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/newest_queries.hpp>

#include "methods/support/entry_of.hpp"

namespace methods_test::mixtures {

using namespace tessera;

using storage = dense<fp32, dim>;

/// Two mixtures that no paper has: blocks under Ada-KV's budget with a second, exact choice at every step; and
/// StreamingLLM's ranking by blocks.
using two_stages = recipe<retain<observation_window, adaptive, top_blocks>, storage, retrieve<exact_score, top_tokens>,
                          gathered_decode, once>;
using block_heavy_hitters =
    recipe<retain<accumulated_attention, pyramid, top_blocks>, storage, retrieve_all, dense_decode, each_step>;

/// Any first stage with any second, by changing a type.
using snapkv_quest = recipe<retain<observation_window, uniform, top_tokens>, storage, retrieve<page_min_max, top_pages>,
                            gathered_decode, once>;
using ada_hsa = recipe<retain<observation_window, two_stage<adaptive>, top_tokens>, storage,
                       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once>;
using pyramid_sparq = recipe<retain<observation_window, two_stage<pyramid>, top_blocks>, storage,
                             retrieve<chosen_channels, top_tokens>, gathered_decode, once>;
using h2o_exact = recipe<retain<accumulated_attention, uniform, top_tokens>, storage, retrieve<exact_score, top_tokens>,
                         gathered_decode, each_step>;
using h2o_hsa = recipe<retain<accumulated_attention, uniform, top_tokens>, storage,
                       retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, each_step>;
using sinks_sparq = recipe<retain<position, uniform, top_tokens>, storage, retrieve<chosen_channels, top_tokens>,
                           gathered_decode, once>;
/// Room is made before a step reads, and what it reads of the rest is chosen.
using recent_exact = recipe<retain<position, uniform, top_tokens>, storage, retrieve<exact_score, top_tokens>,
                            gathered_decode, before_each_step>;
using recent_sparq = recipe<retain<position, uniform, top_tokens>, storage, retrieve<chosen_channels, top_tokens>,
                            gathered_decode, before_each_step>;
using rocket_exact = recipe<retain<observation_window, two_stage<uniform>, top_tokens>, storage,
                            retrieve<exact_score, top_tokens>, gathered_decode, once>;
/// And filters: without a second stage, with an exact one, over accumulated scores, with Quest and SparQ inside.
using snapkv_turns = recipe<filter<observation_window, uniform, top_tokens>, storage, retrieve_all, dense_decode, once>;
using snapkv_turns_exact = recipe<filter<observation_window, uniform, top_tokens>, storage,
                                  retrieve<exact_score, top_tokens>, gathered_decode, once>;
using h2o_turns_quest = recipe<filter<accumulated_attention, two_stage<uniform>, top_tokens>, storage,
                               retrieve<page_min_max, top_pages>, gathered_decode, once>;
using ada_turns_sparq = recipe<filter<observation_window, two_stage<adaptive>, top_tokens>, storage,
                               retrieve<chosen_channels, top_tokens>, gathered_decode, once>;
/// Choices that are made again while an answer grows: of a filter's lists with pages inside, and of what stays.
using newest_turns_quest = recipe<filter<newest_queries, uniform, top_tokens>, storage,
                                  retrieve<page_min_max, top_pages>, gathered_decode, every_outputs>;
using newest_kept =
    recipe<retain<newest_queries, uniform, top_blocks>, storage, retrieve_all, dense_decode, every_outputs>;
/// Lines of prompts before other stages.
using lines_rocket_turns = recipe<filter<observation_window, two_stage<uniform>, top_tokens>, storage,
                                  retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once, covering_lines>;
using lines_h2o = recipe<retain<accumulated_attention, uniform, top_tokens>, storage, retrieve_all, dense_decode,
                         each_step, vertical_slash>;

/// Which tokens stay and which elements of them: any method over packed rows, wherever those lie.
using packed_snapkv = snapkv<fp32, dim, dim, mosaic_rows<storage>>;
using packed_rocketkv = rocketkv<fp32, dim, dim, mosaic_rows<stored<dense_rows<fp32, dim>, fixed_pages<16>>>>;
using think_snapkv = snapkv<fp32, dim, dim, think_rows<storage>>;
/// Tokens leave segments in every step; and blocks of what a first stage has left.
using packed_h2o = recipe<retain<accumulated_attention, uniform, top_tokens>, mosaic_rows<storage>, retrieve_all,
                          dense_decode, each_step>;
using snapkv_mosaickv = recipe<retain<observation_window, uniform, top_tokens>, mosaic_rows<storage>,
                               retrieve<block_mean, whole_blocks>, gathered_decode, once>;
using rocket_mosaickv = recipe<retain<observation_window, two_stage<adaptive>, top_tokens>, mosaic_rows<storage>,
                               retrieve<block_mean, whole_blocks>, gathered_decode, once>;

}  // namespace methods_test::mixtures
