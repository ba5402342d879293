// Scores by position alone, on the GPU.
#pragma once

#include <algorithm>

#include "../../../concepts/scorer.hpp"
#include "../device/check.cuh"
#include "score_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
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

}  // namespace cuda
TESSERA_NAMESPACE_END
