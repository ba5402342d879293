// Scores without queries, on the GPU: by position, by contents, or relative to later tokens.
#pragma once

#include <algorithm>

#include "../../../concepts/scorer.hpp"
#include "../device/check.cuh"
#include "detail/contents.cuh"
#include "detail/lagged.cuh"
#include "score_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Scores by position alone, on the GPU.

namespace detail {

template <class View, class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    score_positions_entry(const __grid_constant__ View view, const index_t* next_position, Scorer scorer, float* scores,
                          offset_t row_stride) {
  const index_t row = blockIdx.y, sequence = row / view.kv_heads, head = row % view.kv_heads;
  const index_t tokens = view.length(sequence, head), next = next_position[sequence];
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads)
    scores[row * row_stride + i] = scorer.score(view.position(sequence, head, i), next);
}

}  // namespace detail

/// Writes scorer.score(position, next_position) of every stored token, whether the view holds positions or not.
/// Shapes   scores [rows, row_stride], row = sequence * kv_heads + head; next_position [sequences], on the device.
template <class View, positional_scorer Scorer>
void score_positions(const View& view, const index_t* next_position, const Scorer& scorer, float* scores,
                     offset_t row_stride, cudaStream_t stream) {
  const unsigned blocks = unsigned(std::clamp<offset_t>(row_stride / 2048, 1, 64));
  detail::score_positions_entry<View, Scorer, 256>
      <<<dim3(blocks, unsigned(view.sequences * view.kv_heads)), 256, 0, stream>>>(view, next_position, scorer, scores,
                                                                                   row_stride);
  check(cudaGetLastError(), "launch of score_positions");
}

namespace detail {

/// Used if a scorer needs queries, or if there is nothing to score.
struct no_stored_score {
  no_stored_score(index_t, index_t) {}
  std::size_t workspace_bytes() const { return 0; }
};
struct position_score {
  position_score(index_t, index_t) {}
  std::size_t workspace_bytes() const { return 0; }
  template <class View, class Scorer>
  void run(const View& view, const index_t* next, const Scorer& scorer, float* scores, offset_t row_stride, void*,
           cudaStream_t stream) const {
    score_positions(view, next, scorer, scores, row_stride, stream);
  }
};
/// `Score`, score_contents or score_lagged, with the arguments of the others.
template <class Score>
struct row_score : Score {
  using Score::Score;
  template <class View, class Scorer>
  void run(const View& view, const index_t*, const Scorer& scorer, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    Score::run(view, scorer, scores, row_stride, workspace, stream);
  }
};

template <class View, class Scorer>
struct stored_score {
  using type = no_stored_score;
};
template <class View, positional_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = position_score;
};
template <class View, contents_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = row_score<score_contents<View, Scorer>>;
};
template <class View, lagged_scorer Scorer>
struct stored_score<View, Scorer> {
  using type = row_score<score_lagged<View, Scorer>>;
};

template <class View, class Scorer>
struct weight_score {
  using type = no_stored_score;
};
template <class View, weighted_scorer Scorer>
struct weight_score<View, Scorer> {
  using type = typename stored_score<View, std::remove_cvref_t<decltype(std::declval<Scorer&>().weight)>>::type;
};

template <class View, class Scorer>
struct factor_score {
  using type = no_stored_score;
};
template <class View, multiplied_scorer Scorer>
struct factor_score<View, Scorer> {
  using type = typename stored_score<View, std::remove_cvref_t<decltype(std::declval<Scorer&>().factor)>>::type;
};

/// blockIdx: x a share of the slots, y a (sequence, kv_head).
template <class View, class Scorer, int Threads>
__global__ void __launch_bounds__(Threads) multiply_entry(const __grid_constant__ View view, Scorer scorer,
                                                          const float* factors, float* scores, offset_t row_stride) {
  const index_t row = index_t(blockIdx.y), tokens = view.length(row / view.kv_heads, row % view.kv_heads);
  const float* own = factors + row * row_stride;
  float* to = scores + row * row_stride;
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads)
    to[i] = scorer.multiplied(to[i], own[i]);
}

}  // namespace detail

/// Multiplies the scores of all stored slots by the factors that the scorer's factor computed.
/// Shapes   factors, scores [sequences * kv_heads, row_stride], at most `row_stride` tokens a row.
/// Cost     one pass over both.
template <class View, multiplied_scorer Scorer>
void multiply_scores(const View& view, const Scorer& scorer, const float* factors, float* scores, index_t row_stride,
                     cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(row_stride, 1024), 1, 128)), unsigned(view.sequences * view.kv_heads)};
  detail::multiply_entry<View, Scorer, 256><<<grid, 256, 0, stream>>>(view, scorer, factors, scores, row_stride);
  check(cudaGetLastError(), "launch of multiply_scores");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
