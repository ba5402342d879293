// One set for all heads of a layer, on the GPU: their scores become one row, its slots go to all heads.
#pragma once

#include <algorithm>

#include "../../../concepts/scope.hpp"
#include "../../../core/selection.hpp"
#include "../score/pool.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A thread a slot, y a sequence: heads in order, as on the host.
template <class Scope, int Threads>
__global__ void __launch_bounds__(Threads)
    join_heads_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, Scope scope,
                     index_t summed) {
  const index_t b = blockIdx.y, tokens = (min)(in.tokens(b, 0), out.capacity);
  float* to = out.row(b);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads) {
    float joined = in.scores[in.begin(b * in.kv_heads) + i];
    for (index_t h = 1; h < in.kv_heads; ++h) {
      joined = scope.join(joined, in.scores[in.begin(b * in.kv_heads + h) + i]);
    }
    to[i] = scope.joined(joined, summed);
  }
}

/// Row b * kv_heads + h gets the slots of row b.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    give_to_heads_entry(selection_view of_layer, index_t kv_heads, index_t* slots, offset_t stride, index_t* counts) {
  const index_t row = blockIdx.y, b = row / kv_heads, count = of_layer.count(b);
  const index_t* from = of_layer.row(b);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    slots[row * stride + i] = from[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[row] = count;
}

}  // namespace detail

/// One row of scores for all heads of each sequence, which must store equally many slots. The bits of the CPU's join
/// where neither fuses what the scope does.
/// Shapes   out [sequences, capacity].   Returns  that row, with lengths and tails of the sequence.   Cost  one read.
template <joining_scope Scope>
score_rows join_heads(const score_rows& in, const Scope& scope, index_t summed, index_t capacity, float* out,
                      cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(capacity, 1024), 1, 512)), unsigned(in.sequences)};
  detail::join_heads_entry<Scope, 256>
      <<<grid, 256, 0, stream>>>(in, detail::finished_rows{out, capacity}, scope, summed);
  check(cudaGetLastError(), "launch of join_heads");
  score_rows joined = in;
  joined.scores = out;
  joined.offsets = nullptr;
  joined.row_stride = capacity;
  joined.kv_heads = 1;
  return joined;
}

/// The slots of each sequence's one row for every one of its heads.
/// Shapes   slots [sequences * kv_heads, stride], counts [sequences * kv_heads].   Returns  the selection of all heads.
inline selection_view give_to_heads(const selection_view& of_layer, index_t sequences, index_t kv_heads, index_t* slots,
                                    index_t stride, index_t* counts, cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(stride, 1024), 1, 64)), unsigned(sequences * kv_heads)};
  detail::give_to_heads_entry<256><<<grid, 256, 0, stream>>>(of_layer, kv_heads, slots, stride, counts);
  check(cudaGetLastError(), "launch of give_to_heads");
  return {slots, counts, nullptr, stride};
}

}  // namespace cuda
TESSERA_NAMESPACE_END
