// Scores of tokens that the engine gives, written beside the stored tokens of a layer.
#pragma once

#include "../../../core/stored/slot_column.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Writes the scores of tokens at positions from `first` on that are still stored. given [kv_heads, tokens].
/// blockIdx.y: the kv_head; the blocks of a row of the grid share its slots.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    set_scores_entry(const __grid_constant__ View view, index_t first, index_t tokens, const float* given,
                     slot_column<float> scores) {
  const index_t head = index_t(blockIdx.y), length = view.length(0, head);
  float* const own = scores.row(0, head, view.kv_heads);
  for (index_t slot = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); slot < length;
       slot += index_t(gridDim.x) * Threads) {
    const index_t at = view.position(0, head, slot) - first;
    if (at >= 0 && at < tokens) own[slot] = given[offset_t(head) * tokens + at];
  }
}

}  // namespace detail

/// Cost     one launch, which reads the positions of a layer.
template <class View>
void set_scores(const View& view, index_t first, index_t tokens, const float* given, const slot_column<float>& scores,
                cudaStream_t stream) {
  if (tokens == 0) return;
  detail::set_scores_entry<View, 256>
      <<<dim3(32, unsigned(view.kv_heads)), 256, 0, stream>>>(view, first, tokens, given, scores);
  check(cudaGetLastError(), "launch of set_scores");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
