// The means of blocks whose rows have changed, made of the rows as they are stored.
#pragma once

#include <algorithm>

#include "../../unpack_rows.cuh"
#include "../pack_vector.cuh"
#include "keep_segment.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Packs the means of a head's blocks from `first` on, of `rows` rows in all. The stored elements of a block are added
/// in the rows' order, as on the CPU. blockIdx.x: a share of the blocks; a warp makes a mean.
template <int Warps>
__device__ void average_stored_rows(const device_segment& of, index_t head, index_t first, index_t rows) {
  __shared__ float means[Warps][largest_head_dim];
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const packed_format& format = of.k.format;
  const index_t blocks = ceil_div(rows, of.block);
  for (index_t b = first + index_t(blockIdx.x) * Warps + warp; b < blocks; b += index_t(gridDim.x) * Warps) {
    const index_t begin = b * of.block, end = (min)(begin + of.block, rows);
    for (index_t c = lane; c < format.channels; c += 32) {
      float sum = 0;
      for (index_t i = begin; i < end; ++i) sum = __fadd_rn(sum, stored_channel(of.k, head, i, c));
      means[warp][c] = __fdiv_rn(sum, float(end - begin));
    }
    __syncwarp();
    pack_vector_by_warp<largest_head_dim>(format, of.means, head, of.means.locate(b), means[warp]);
    __syncwarp();
  }
}

/// blockIdx: x a share of the blocks, y a kv_head behind `first_head`. `of` still counts the rows before the choice.
template <int Warps>
__global__ void __launch_bounds__(Warps * 32)
    keep_means_entry(const __grid_constant__ device_segment of, selection_view chosen,
                     const __grid_constant__ some_segment_slots own, index_t first_head) {
  const index_t at = index_t(blockIdx.y), head = first_head + at, count = own.count[at];
  const index_t unchanged =
      unchanged_blocks(of.block, of.rows[head], chosen.row(head) + own.listed[at], own.first[at], count);
  average_stored_rows<Warps>(of, head, unchanged, count);
}

/// blockIdx as above. The means of blocks from own.first[head] on, of own.count[head] rows.
template <int Warps>
__global__ void __launch_bounds__(Warps * 32)
    renew_means_entry(const __grid_constant__ device_segment of, const __grid_constant__ some_segment_slots own,
                      index_t first_head) {
  const index_t at = index_t(blockIdx.y);
  average_stored_rows<Warps>(of, first_head + at, own.first[at], own.count[at]);
}

inline constexpr int averaging_warps = 8;
/// Blocks of threads for the means of a head with `rows` rows.
inline dim3 averaging_grid(const device_segment& of, index_t rows, index_t heads) {
  return {unsigned(std::clamp(ceil_div(ceil_div(rows, of.block), averaging_warps), 1, 256)), unsigned(heads)};
}

}  // namespace detail

/// Makes the means of blocks that have lost rows and of all blocks behind them in a head, after `keep_segment`.
/// Returns  means of stored elements, packed as keys are, with the CPU's bits where rows have those.
/// Cost     a launch for 64 heads; the rows of these blocks are read once.
inline void keep_means(const device_segment& of, const selection_view& chosen, const segment_slots& slots,
                       index_t kv_heads, cudaStream_t stream) {
  const index_t rows = *std::max_element(slots.count, slots.count + kv_heads);
  detail::in_some_heads(slots, kv_heads, [&](const auto& own, index_t first, index_t some) {
    constexpr int warps = detail::averaging_warps;
    detail::keep_means_entry<warps>
        <<<detail::averaging_grid(of, rows, some), warps * 32, 0, stream>>>(of, chosen, own, first);
    check(cudaGetLastError(), "launch of keep_means");
  });
}

/// Makes the means of blocks first[head], ... of heads that have rows[head] rows, whatever the device counts.
/// Cost     as `keep_means`.
inline void renew_means(const device_segment& of, const index_t* first, const index_t* rows, index_t kv_heads,
                        cudaStream_t stream) {
  const index_t longest = *std::max_element(rows, rows + kv_heads);
  detail::in_some_heads({first, first, rows}, kv_heads, [&](const auto& own, index_t first_head, index_t some) {
    constexpr int warps = detail::averaging_warps;
    detail::renew_means_entry<warps>
        <<<detail::averaging_grid(of, longest, some), warps * 32, 0, stream>>>(of, own, first_head);
    check(cudaGetLastError(), "launch of renew_means");
  });
}

}  // namespace cuda
TESSERA_NAMESPACE_END
