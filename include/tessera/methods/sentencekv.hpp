// SentenceKV: whole sentences of what SnapKV kept, ranked anew as the answer's sentence grows.
#pragma once

#include "../attention/gathered_decode.hpp"
#include "../budget/uniform.hpp"
#include "../budget/wider_first.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scorer/observation_window.hpp"
#include "../scorer/segment_mean.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Budget t is what a step reads. When a prompt ends, `factor` (3) times t tokens stay by SnapKV's scores (window 32,
/// max-pool 7). A step reads the first 32 and the newest 32 of them and, for the rest of t, the segments whose mean key
/// matches the mean query of the answer's segment so far best; its first token reads everything. Needs `boundaries`
/// with each prompt chunk and each step.
/// Paper    Zhu et al., SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching, arXiv:2504.00970.
/// Differs  per kv_head, not per query head; nothing is moved to the host's memory; the last segment that is taken is
///          cut behind its first tokens, as in the authors' code, so that a step reads exactly t; below 64 tokens the
///          newest come first. See `segment_mean`. A later turn keeps anew among what is left and what is new.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct sentencekv : recipe<retain<observation_window, wider_first<uniform>, top_tokens>, Layout,
                           retrieve<segment_mean, top_tokens>, gathered_decode, once> {
  static constexpr const char* name = "sentencekv";
  static constexpr const char* paper = "SentenceKV, arXiv:2504.00970";
};

TESSERA_NAMESPACE_END
