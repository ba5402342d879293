// Whole rows that have been packed go: the others move to where they were.
#pragma once

#include "../../../../core/host/host_vector.hpp"
#include "../../device/launch.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The oldest `count` rows of every head of one sequence.
template <class View>
struct oldest_rows {
  View view;
  index_t count = 0;
};

namespace detail {

/// Row i + `count` of what `row(i)` gives, 16 bytes at a time, becomes row i. By one block: what is read lies behind
/// all that has been written.
template <int Threads, class Row>
__device__ void move_rows_down(index_t left, index_t count, int row_units, const Row& row) {
  for (index_t begin = 0; begin < left * row_units; begin += Threads) {
    const index_t unit = begin + index_t(threadIdx.x), i = unit / row_units, at = unit % row_units;
    uint4 held{};
    if (i < left) held = reinterpret_cast<const uint4*>(row(i + count))[at];
    __syncthreads();
    if (i < left) reinterpret_cast<uint4*>(row(i))[at] = held;
    __syncthreads();
  }
}

/// blockIdx: the kv_head, and which of the list.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    drop_oldest_entry(const __grid_constant__ problem_list<oldest_rows<View>> list) {
  using stored = typename View::stored_type;
  constexpr int k_units = View::k_dim * int(sizeof(stored)) / 16, v_units = View::v_dim * int(sizeof(stored)) / 16;
  const View& view = list.of[blockIdx.y].view;
  const index_t head = index_t(blockIdx.x), count = list.of[blockIdx.y].count;
  index_t* lengths = const_cast<index_t*>(view.lengths);
  const index_t left = lengths[head] - count;
  move_rows_down<Threads>(left, count, k_units, [&](index_t i) { return view.key(0, head, i); });
  move_rows_down<Threads>(left, count, v_units, [&](index_t i) { return view.value(0, head, i); });
  if (view.positions) {
    index_t* positions = const_cast<index_t*>(view.positions) + view.position_begin[head];
    for (index_t begin = 0; begin < left; begin += Threads) {
      const index_t i = begin + index_t(threadIdx.x);
      const index_t held = i < left ? positions[i + count] : 0;
      __syncthreads();
      if (i < left) positions[i] = held;
      __syncthreads();
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) lengths[head] = left;
}

}  // namespace detail

/// Forgets the oldest rows of several sequences. Cost: a launch for 32 of them.
template <class View>
void drop_oldest(const host_vector<oldest_rows<View>>& all, cudaStream_t stream) {
  static_assert(View::is_raw, "tessera: rows that are packed on the device are raw");
  in_lists(all.data(), all.size(), [&](const problem_list<oldest_rows<View>>& list, index_t some) {
    launch(detail::drop_oldest_entry<View, 256>,
           {.blocks = dim3(unsigned(list.of[0].view.kv_heads), unsigned(some)), .threads = dim3(256)}, stream,
           "launch of drop_oldest", list);
  });
}

}  // namespace cuda
TESSERA_NAMESPACE_END
