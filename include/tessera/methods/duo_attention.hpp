// DuoAttention: heads that look far back keep everything, the others the first and the newest tokens.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/head_classes.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/before_each_step.hpp"
#include "../scorer/position.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Streaming heads keep the first `sinks` (4) tokens and the newest, `budget` in all, and make room before a step
/// reads. Retrieval heads keep everything. Which are which follows from a gate for each kv_head
/// (`retain.budget.gates`), found once for a model; the tool's `heads` measures them.
/// Paper    Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
///          arXiv:2410.10819.
/// Differs  published: 128 sinks in a budget of 384. Prompts attend to all of themselves. Gates are any numbers that
///          rank heads; published ones are trained.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct duo_attention
    : recipe<retain<position, head_classes, top_tokens>, Layout, retrieve_all, dense_decode, before_each_step> {
  static constexpr const char* name = "duo_attention";
  static constexpr const char* paper = "DuoAttention, arXiv:2410.10819";
};

TESSERA_NAMESPACE_END
