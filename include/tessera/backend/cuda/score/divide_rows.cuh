// Sums over a window's query rows become their mean, on the GPU.
#pragma once

#include <algorithm>

#include "../device/check.cuh"
#include "score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View, int Threads>
__global__ void __launch_bounds__(Threads) divide_rows_entry(const __grid_constant__ score_problem<View> p) {
  const index_t row = blockIdx.y, b = row / p.view.kv_heads, h = row % p.view.kv_heads;
  const index_t tokens = p.view.length(b, h), asked = p.valid_queries(b);
  if (asked == 0) return;
  float* scores = p.score_row(row);
  const float rows = float(asked * (p.q.heads / p.view.kv_heads));
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads)
    scores[i] /= rows;
}

}  // namespace detail

/// Divides what a scoring call has written by how many query rows it added up: those of a token's group, for every
/// query that counts. `capacity`: the most tokens of a row.   Cost  one read and write of the scores.
template <class View>
void divide_rows(const score_problem<View>& problem, index_t capacity, cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(capacity, 2048), 1, 64)),
                  unsigned(problem.view.sequences * problem.view.kv_heads)};
  detail::divide_rows_entry<View, 256><<<grid, 256, 0, stream>>>(problem);
  check(cudaGetLastError(), "launch of divide_rows");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
