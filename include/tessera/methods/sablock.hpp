// SABlock: segments of the text raise their tokens' scores, and blocks as large as a segment allows are kept.
#pragma once

#include "../attention/dense_decode.hpp"
#include "../budget/uniform.hpp"
#include "../layout/dense.hpp"
#include "../recipe.hpp"
#include "../schedule/once.hpp"
#include "../scope/per_layer.hpp"
#include "../scorer/by_segment.hpp"
#include "../scorer/observation_window.hpp"
#include "../selector/adaptive_blocks.hpp"

TESSERA_NAMESPACE_BEGIN

/// Keeps the last `window` (8) tokens, and of the segments before them blocks by the attention of the window's queries,
/// mean over all heads, max-pooled over 7 neighbours. One set for all heads of a layer. Needs `boundaries` with each
/// prompt chunk.
/// Paper    Chen et al., SABlock: Semantic-Aware KV Cache Eviction with Adaptive Compression Block Size,
///          arXiv:2510.22556, Sec. III-A (segments), III-B (their factor), III-C (block sizes).
/// Differs  the formulas are not in the public text: importance and diversity are put on a scale from 0 to 1 before
///          they are combined, segments have at most 256 tokens, and candidate sizes are 9, 7, 5, 3, 1. The paper names
///          no pooling: scores are pooled as SnapKV's are, so a token's score reaches 3 tokens beyond a segment's end.
///          `pool=1` is without it, and was measured to answer less (docs/results.md). A later turn chooses again among
///          what is left and what is new.
template <element T, int D, int Dv = D, layout_of<T, D, Dv> Layout = dense<T, D, Dv>>
struct sablock : recipe<retain<by_segment<observation_window>, uniform, adaptive_blocks, per_layer<over_heads::mean>>,
                        Layout, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "sablock";
  static constexpr const char* paper = "SABlock, arXiv:2510.22556";
  sablock() { this->retain.scorer.window = 8; }
};

TESSERA_NAMESPACE_END
