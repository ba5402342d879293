// Copies blocks of rows that page tables name.
#pragma once

#include <algorithm>

#include "run_pool.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Block i of a row of one table to block i of the same row of another: x a block, y a row, z a plane, whose `row_bytes` are those of a block.
/// `tokens` of a row, in blocks of `page`, where rows are of uneven length; null: every block of the grid.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    copy_blocks_entry(const __grid_constant__ plane_list list, const index_t* tokens, index_t page, const index_t* from,
                      const index_t* to, index_t stride) {
  const offset_t at = offset_t(blockIdx.y) * stride + blockIdx.x;
  if (tokens && index_t(blockIdx.x) >= ceil_div(tokens[blockIdx.y], page)) return;
  const plane p = list.planes[blockIdx.z];
  const offset_t each = p.row_bytes / 4;
  const auto* source = reinterpret_cast<const std::uint32_t*>(p.data) + from[at] * each;
  auto* target = reinterpret_cast<std::uint32_t*>(p.data) + to[at] * each;
  for (offset_t i = threadIdx.x; i < each; i += Threads) target[i] = source[i];
}

}  // namespace detail

/// As above, of `rows` rows of a table with at most `blocks` blocks each.
inline void copy_blocks(const detail::plane_list& list, int planes, index_t rows, index_t blocks, const index_t* tokens,
                        index_t page, const index_t* from, const index_t* to, index_t stride, cudaStream_t stream) {
  if (blocks == 0) return;
  const dim3 grid{unsigned(blocks), unsigned(rows), unsigned(planes)};
  detail::copy_blocks_entry<128><<<grid, 128, 0, stream>>>(list, tokens, page, from, to, stride);
  check(cudaGetLastError(), "launch of copy_blocks");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
