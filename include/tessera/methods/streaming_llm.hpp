// StreamingLLM: attention sinks and a sliding window of recent tokens.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/before_each_step.hpp"
#include "../scorer/position.hpp"
#include "../selector/top_tokens.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the first `sinks` (4) tokens and the newest, `budget` in all. A step makes room for its own tokens before it
/// reads, as published: it never reads more than the budget.
/// Paper    Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453.
/// Differs  keys keep the rotation of their original positions, and queries use true positions.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct streaming_llm
    : recipe<retain<position, uniform, top_tokens>, Layout, retrieve_all, dense_decode, before_each_step> {
  static constexpr const char* name = "streaming_llm";
  static constexpr const char* paper = "StreamingLLM, arXiv:2309.17453";
};

TESSERA_NAMESPACE_END
