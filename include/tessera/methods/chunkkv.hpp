// ChunkKV: whole chunks of consecutive tokens, the same ones in all heads of a layer, and in the next layers.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scope/per_layers.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/top_blocks.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the last `window` tokens and the chunks of `block` (10) tokens that their queries look at most, summed over
/// all heads. With `reuse` above 1 the set of a layer serves the layers behind it.
/// Paper    Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
///          arXiv:2502.00299.
/// Differs  the last chunk that is taken is trimmed to its best tokens, so that the budget is met exactly; chunks are
///          those of the tokens before the window. A short last chunk competes by its sum, as in the paper (kvpress
///          0.5.5 ranks chunks by their mean and keeps whole ones). Scores are not pooled.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct chunkkv : recipe<retain<observation_window, uniform, top_blocks, per_layers<over_heads::sum>>, Layout,
                        retrieve_all, dense_decode, once> {
  static constexpr const char* name = "chunkkv";
  static constexpr const char* paper = "ChunkKV, arXiv:2502.00299";
  chunkkv() {
    this->retain.scorer.pool = 1;
    this->retain.selector.block = 10;
  }
};

TESSERA_NAMESPACE_END
