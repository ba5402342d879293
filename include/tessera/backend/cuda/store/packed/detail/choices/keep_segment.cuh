// Chosen rows of a segment of packed rows move next to each other, in its memory or in other memory.
#pragma once

#include <algorithm>

#include "../../../../../../core/selection.hpp"
#include "../segment_format.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Which of a head's chosen slots are rows of a segment, on the host, by kv_head.
struct segment_slots {
  const index_t* listed;  ///< chosen slots before them
  const index_t* first;   ///< the slot of the segment's first row
  const index_t* count;
};

namespace detail {

/// The same for some heads, which a launch reads from its parameters.
struct some_segment_slots {
  static constexpr index_t capacity = 64;
  index_t listed[capacity], first[capacity], count[capacity];
};
/// Calls launch(own, first, some) for the heads first, ..., first + some - 1 of `kv_heads`.
template <class Launch>
void in_some_heads(const segment_slots& slots, index_t kv_heads, const Launch& launch) {
  for (index_t first = 0; first < kv_heads; first += some_segment_slots::capacity) {
    some_segment_slots own{};
    const index_t some = (std::min)(kv_heads - first, some_segment_slots::capacity);
    std::copy_n(slots.listed + first, some, own.listed);
    std::copy_n(slots.first + first, some, own.first);
    std::copy_n(slots.count + first, some, own.count);
    launch(own, first, some);
  }
}

/// Copies `count` rows of `units` units each: unit `u` of row from(i) to unit `u` of row to(i). By one block, and in
/// order: rows that are read lie behind all rows that have been written, or in other memory.
template <int Threads, class Unit, class From, class To>
__device__ void move_rows(index_t count, index_t units, const From& from, const To& to) {
  constexpr int together = 4;
  const offset_t all = offset_t(count) * units;
  for (offset_t begin = 0; begin < all; begin += Threads * together) {
    Unit held[together];
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const offset_t i = begin + j * Threads + int(threadIdx.x);
      if (i < all) held[j] = reinterpret_cast<const Unit*>(from(index_t(i / units)))[i % units];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < together; ++j) {
      const offset_t i = begin + j * Threads + int(threadIdx.x);
      if (i < all) reinterpret_cast<Unit*>(to(index_t(i / units)))[i % units] = held[j];
    }
    __syncthreads();
  }
}

/// Moves `count` vectors of a head: vector row_of(i) of `source` to vector i of `target`, in the same format.
template <int Threads, class RowOf>
__device__ void move_vectors(const packed_vectors& source, const packed_vectors& target, index_t head, index_t count,
                             const RowOf& row_of) {
  move_rows<Threads, uint4>(
      count, value_stride(source.format.value_bytes()) / 16,
      [&](index_t i) { return source.values_of(head, row_of(i)); },
      [&](index_t i) { return target.values_of(head, i); });
  if (source.format.own_bits) {
    move_rows<Threads, std::uint32_t>(
        count, bit_words(source.format), [&](index_t i) { return source.own_bits_of(head, row_of(i)); },
        [&](index_t i) { return target.own_bits_of(head, i); });
  }
  if (source.format.scaled()) {
    move_rows<Threads, float>(
        count, 1, [&](index_t i) { return &source.scale_of(head, row_of(i)); },
        [&](index_t i) { return &target.scale_of(head, i); });
  }
}

/// How many blocks of `block` rows keep all of their rows, before the first one that does not. A head keeps `count` of
/// its `before` rows of a segment, whose slots begin at `first`.
__device__ inline index_t unchanged_blocks(index_t block, index_t before, const index_t* slots, index_t first,
                                           index_t count) {
  if (count == before) return ceil_div(count, block);
  index_t low = 0, high = count;  // the first rows keep their numbers
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    slots[middle] - first == middle ? void(low = middle + 1) : void(high = middle);
  }
  return low / block;
}

/// blockIdx: x a kv_head behind `first_head`, y keys, values or means; of these the ones of unchanged blocks.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    keep_segment_entry(const __grid_constant__ device_segment from, const __grid_constant__ device_segment to,
                       selection_view chosen, const __grid_constant__ some_segment_slots own, index_t first_head) {
  const index_t at = index_t(blockIdx.x), head = first_head + at, count = own.count[at], first = own.first[at];
  const index_t* const slots = chosen.row(head) + own.listed[at];
  if (blockIdx.y == 2) {
    const index_t blocks = unchanged_blocks(from.block, from.rows[head], slots, first, count);
    return move_vectors<Threads>(from.means, to.means, head, blocks, [](index_t i) { return i; });
  }
  move_vectors<Threads>(blockIdx.y == 0 ? from.k : from.v, blockIdx.y == 0 ? to.k : to.v, head, count,
                        [&](index_t i) { return slots[i] - first; });
}

}  // namespace detail

/// Moves the chosen rows of a segment to `to`, in their order: elsewhere, or in the same memory no further behind.
/// Means move with blocks that keep their rows; `keep_means` makes the others.
/// Cost     a launch for 64 heads. A block moves the keys, the values or the means of one head.
inline void keep_segment(const device_segment& from, const device_segment& to, const selection_view& chosen,
                         const segment_slots& slots, index_t kv_heads, cudaStream_t stream) {
  detail::in_some_heads(slots, kv_heads, [&](const auto& own, index_t first, index_t some) {
    const dim3 grid{unsigned(some), to.block > 0 ? 3u : 2u};
    detail::keep_segment_entry<256><<<grid, 256, 0, stream>>>(from, to, chosen, own, first);
    check(cudaGetLastError(), "launch of keep_segment");
  });
}

}  // namespace cuda
TESSERA_NAMESPACE_END
