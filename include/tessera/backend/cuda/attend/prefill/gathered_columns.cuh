// The rows of vertical lines, gathered side by side in front of attention along lines, so that the copy engine fetches
// them too.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../choose/lines/line_tables.cuh"
#include "../../device/check.cuh"
#include "../../device/warp.cuh"
#include "tensor_map.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Memory in which attention along lines may lay rows side by side, aligned to 16 bytes; scratch.
/// Lost (ms, 10 % of 128K, d 128, bf16, H200, CUDA 13.0): each block gathers them anew 60.7, where this took 59.1.
struct column_memory {
  void* data = nullptr;
  std::size_t bytes = 0;
};

namespace detail {

/// What a launch says of lines beside the problem.
struct line_argument {
  line_tables lines;
  row_maps columns;  // of gathered rows, a tile to a box; box_rows 0: nothing is gathered
  index_t room = 0;  // so many rows
};

/// Of gathered rows a head has whole tiles, wherever its first one begins: zeros behind its own.
template <int Tile>
__device__ index_t gathered_rows(index_t columns) {
  return (columns / Tile + 2) * Tile;
}
/// Where the rows of a head's vertical lines lie among those that are gathered; no_index: there is no room for them. By
/// a warp.
template <int Tile>
__device__ index_t gathered_at(const line_tables& lines, index_t q_head, index_t room) {
  offset_t before = 0;
  for (index_t head = index_t(threadIdx.x % 32); head < q_head; head += 32) {
    before += gathered_rows<Tile>(lines.column_counts[head]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
  return before + gathered_rows<Tile>(lines.column_counts[q_head]) <= room ? index_t(before) : no_index;
}

/// Copies the rows of a query head's vertical lines; gridDim.y query heads.
template <class View, int Tile, int Threads>
__global__ void __launch_bounds__(Threads)
    gather_columns_entry(const __grid_constant__ View view, line_tables lines, index_t room,
                         typename View::element_type* keys, typename View::element_type* values) {
  constexpr int D = View::k_dim, Dv = View::v_dim, chunks = (D + Dv) / 8;
  const index_t q_head = index_t(blockIdx.y), head = q_head / (index_t(gridDim.y) / view.kv_heads);
  const index_t begin = gathered_at<Tile>(lines, q_head, room);
  if (begin == no_index) return;
  const index_t columns = lines.column_counts[q_head], stored = view.length(0, head);
  const index_t* const slots = lines.columns_of(q_head);
  const offset_t all = offset_t(gathered_rows<Tile>(columns)) * chunks;
#pragma unroll 4
  for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < all; i += offset_t(gridDim.x) * Threads) {
    const index_t row = index_t(i / chunks);
    const int chunk = int(i % chunks);
    const index_t slot = row < columns ? slots[row] : no_index;
    uint4 copied = {};
    if (slot >= 0 && slot < stored) {
      const auto* from =
          chunk < D / 8 ? view.key(0, head, slot) + chunk * 8 : view.value(0, head, slot) + (chunk - D / 8) * 8;
      copied = __ldg(reinterpret_cast<const uint4*>(from));
    }
    auto* to = chunk < D / 8 ? keys + offset_t(begin + row) * D + chunk * 8
                             : values + offset_t(begin + row) * Dv + (chunk - D / 8) * 8;
    *reinterpret_cast<uint4*>(to) = copied;
  }
}

/// Gathers the rows of all heads for which there is room, and says where.
template <class View, int Tile>
void gather_columns(const View& view, index_t q_heads, const column_memory& memory, line_argument& argument,
                    cudaStream_t stream) {
  if constexpr (View::is_raw && sizeof(typename View::element_type) == 2) {
    using T = std::remove_const_t<typename View::element_type>;
    constexpr int row_bytes = (View::k_dim + View::v_dim) * 2, threads = 256;
    const std::size_t most = std::size_t(1) << 24, rows = (std::min)(memory.bytes / row_bytes, most);
    const index_t room = index_t(rows / Tile * Tile);
    if (!memory.data || room < 2 * Tile) return;
    T* const keys = static_cast<T*>(memory.data);
    T* const values = keys + std::size_t(room) * View::k_dim;
    row_maps maps;
    if (!map_rows(maps.k, keys, View::k_dim, {0, 0, View::k_dim, 1}, Tile)) return;
    if (!map_rows(maps.v, values, View::v_dim, {0, 0, View::v_dim, 1}, Tile)) return;
    maps.box_rows = Tile;
    gather_columns_entry<View, Tile, threads>
        <<<dim3(32, unsigned(q_heads)), threads, 0, stream>>>(view, argument.lines, room, keys, values);
    check(cudaGetLastError(), "launch of gather_columns");
    argument.columns = maps, argument.room = room;
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
