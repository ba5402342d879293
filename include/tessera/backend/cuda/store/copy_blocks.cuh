// Copies blocks of rows that page tables name.
#pragma once

#include <algorithm>

#include "places/run_pool.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Block i of a row of one table to block i of the same row of another: x a block, y a row, z a plane, whose
/// `row_bytes` are those of a block. `tokens` of a row, in blocks of `page`, where rows are of uneven length; null:
/// every block of the grid.
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

/// A pool of `all` blocks of `rows` rows each, and what is to be copied of it: see `copy_blocks_entry`.
template <class Layout>
struct block_pool {
  using encoding_type = typename Layout::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  stored_type *k, *v;
  float* scales;  ///< of rows that are scaled: those of K, then those of V
  offset_t all, rows;

  /// The blocks that `rows_of_table` rows of one table name, at most `blocks` each, become those of another.
  void copy(index_t rows_of_table, index_t blocks, const index_t* tokens, index_t page, const index_t* from,
            const index_t* to, index_t stride, cudaStream_t stream) const {
    if (blocks == 0) return;
    detail::plane_list list;
    const auto plane_of = [&](auto* data, offset_t elements) {
      return plane{reinterpret_cast<std::byte*>(data), index_t(rows * elements * offset_t(sizeof(*data)))};
    };
    list.planes[0] = plane_of(k, Layout::k_dim), list.planes[1] = plane_of(v, Layout::v_dim);
    if constexpr (encoding_type::scaled)
      list.planes[2] = plane_of(scales, 1), list.planes[3] = plane_of(scales + all * rows, 1);
    const dim3 grid{unsigned(blocks), unsigned(rows_of_table), encoding_type::scaled ? 4u : 2u};
    detail::copy_blocks_entry<128><<<grid, 128, 0, stream>>>(list, tokens, page, from, to, stride);
    check(cudaGetLastError(), "launch of copy_blocks");
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
