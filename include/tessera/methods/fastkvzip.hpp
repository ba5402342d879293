// FastKVzip: a gate that has learned what KVzip finds scores each token as it comes.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/calibrated.hpp"
#include "../layout/dense_rows.hpp"
#include "../layout/ragged_pages.hpp"
#include "../layout/stored.hpp"
#include "../recipe.hpp"
#include "../schedule/each_chunk.hpp"
#include "../scorer/given_scores.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the newest `recent` (32) tokens, the first `sinks` (4), and those that a gate scores highest, with TANGRAM's
/// budgets: a prompt is compressed chunk by chunk, and each head keeps its calibrated share.
/// Needs    the engine to compute the gate, from the hidden states that enter a layer's attention, and to hand its
///          scores over: `cache::set_scores`. For the example model it is `gate/gate.safetensors` in examples/model.
/// Paper    Kim, Han, Yun, Fast KVzip: Efficient and Accurate LLM Inference with Gated KV Eviction, arXiv:2601.17668;
///          TANGRAM, arXiv:2606.06302, for budgets and pages.
/// Differs  the authors keep one threshold over all layers' heads, and the newest 4,096 tokens or 2 % of a shorter
///          context. Here heads keep shares, and `recent` is a number of tokens.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = stored<dense_rows<T, D, Dv>, ragged_pages>>
struct fastkvzip
    : recipe<retain<given_scores, calibrated, top_tokens>, Layout, retrieve_all, dense_decode, each_chunk> {
  static constexpr const char* name = "fastkvzip";
  static constexpr const char* paper = "FastKVzip, arXiv:2601.17668";

  fastkvzip() {
    this->retain.scorer.sinks = 4;
    this->retain.scorer.recent = 32;
  }
};

TESSERA_NAMESPACE_END
