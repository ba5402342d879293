// What a choice leaves of the packed and the whole rows of a layer of one sequence: which they are, and which of them
// are packed next.
#pragma once

#include <algorithm>

#include "../../../../../../core/selection.hpp"
#include "../../packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Chosen slots, ascending, on the device.
struct slot_lists {
  index_t* slots = nullptr;  ///< [kv_heads, stride]
  index_t stride = 0;
};

/// Rows by kv_head, on the device.
struct kept_counts {
  const index_t* stored;  ///< packed rows before the choice
  const index_t* packed;  ///< those of them that stay
  const index_t* due;     ///< whole rows that stay and are packed
  const index_t* whole;   ///< whole rows that stay, those included
};

namespace detail {

/// Rows of a head in all segments of the view's sequence.
template <class View>
__device__ index_t packed_rows_of(const View& view, index_t head) {
  index_t rows = 0;
  for (index_t s = 0, count = view.count(0); s < count; ++s) rows += view.segment(0, s).rows[head];
  return rows;
}

/// Copies a choice, everything where it has no indices, and counts how much of it lies in each segment and in the whole
/// rows: counts [segments + 1, kv_heads]. A block has a kv_head.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    note_choice_entry(const __grid_constant__ View view, selection_view chosen, slot_lists to, index_t* counts) {
  const index_t head = index_t(blockIdx.x), heads = view.whole.kv_heads, segments = view.count(0);
  const index_t all = packed_rows_of(view, head) + view.whole.length(0, head);
  const index_t* const from = chosen.indices ? chosen.row(head) : nullptr;
  const index_t count = (min)((max)(from ? chosen.count(head) : all, 0), to.stride);
  for (index_t i = index_t(threadIdx.x); i < count; i += Threads)
    to.slots[offset_t(head) * to.stride + i] = from ? from[i] : i;
  if (threadIdx.x > 0) return;
  index_t begin = 0, end_slot = 0;
  for (index_t s = 0; s <= segments; ++s) {
    index_t end = count;
    if (s < segments) {
      end_slot += view.segment(0, s).rows[head];
      index_t low = begin;
      while (low < end) {
        const index_t middle = low + (end - low) / 2;
        (from ? from[middle] : middle) < end_slot ? void(low = middle + 1) : void(end = middle);
      }
    }
    counts[s * heads + head] = end - begin;
    begin = end;
  }
}

/// Writes which whole rows stay whole: to [kv_heads, stride], and their number.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    list_left_entry(slot_lists chosen, kept_counts counts, index_t* to, index_t* to_counts) {
  const index_t head = index_t(blockIdx.x), packed = counts.packed[head] + counts.due[head];
  const index_t left = counts.whole[head] - counts.due[head];
  const offset_t row = offset_t(head) * chosen.stride;
  for (index_t i = index_t(threadIdx.x); i < left; i += Threads)
    to[row + i] = chosen.slots[row + packed + i] - counts.stored[head];
  if (threadIdx.x == 0) to_counts[head] = left;
}

/// The positions of packed rows, [kv_heads, capacity]: of those that stay and those that are packed next. In place, by
/// a block for each kv_head: what is read lies behind what has been written.
template <class Whole, int Threads>
__global__ void __launch_bounds__(Threads)
    keep_positions_entry(const __grid_constant__ Whole whole, slot_lists chosen, kept_counts counts, index_t* positions,
                         index_t capacity) {
  const index_t head = index_t(blockIdx.x), held = counts.stored[head], all = counts.packed[head] + counts.due[head];
  index_t* const own = positions + offset_t(head) * capacity;
  for (index_t begin = 0; begin < all; begin += Threads) {
    const index_t i = begin + index_t(threadIdx.x);
    const index_t slot = i < all ? chosen.slots[offset_t(head) * chosen.stride + i] : 0;
    const index_t position = i < all ? (slot < held ? own[slot] : whole.position(0, head, slot - held)) : 0;
    __syncthreads();
    if (i < all) own[i] = position;
    __syncthreads();
  }
}

/// Adds the positions of the `count` oldest whole rows, of the due ones where `due` is given, before they are packed.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads) add_positions_entry(const __grid_constant__ View view, const index_t* due,
                                                               index_t count, index_t* positions, index_t capacity) {
  const index_t head = index_t(blockIdx.x), held = packed_rows_of(view, head), all = due ? due[head] : count;
  index_t* const own = positions + offset_t(head) * capacity + held;
  for (index_t i = index_t(threadIdx.x); i < all; i += Threads) own[i] = view.whole.position(0, head, i);
}

/// The positions of packed rows of which nothing was dropped: their slots.
template <class View, int Threads>
__global__ void __launch_bounds__(Threads)
    count_packed_positions_entry(const __grid_constant__ View view, index_t* positions, index_t capacity) {
  const index_t head = index_t(blockIdx.x), held = packed_rows_of(view, head);
  for (index_t i = index_t(threadIdx.x); i < held; i += Threads) positions[offset_t(head) * capacity + i] = i;
}

/// Copies whole rows that are due side by side to slots 0, ..., count - 1 of `to`; heads with fewer get rows of zeros.
/// `chosen` without slots: the oldest rows. blockIdx: x a share of the rows, y a kv_head, z keys or values.
template <class From, class To, int Threads>
__global__ void __launch_bounds__(Threads)
    gather_due_entry(const __grid_constant__ From from, slot_lists chosen, kept_counts counts, index_t count,
                     const __grid_constant__ To to) {
  const index_t head = index_t(blockIdx.y), due = counts.due[head];
  const bool keys = blockIdx.z == 0;
  const index_t units = (keys ? From::k_dim : From::v_dim) * index_t(sizeof(typename From::stored_type)) / 16;
  for (index_t at = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); at < count * units;
       at += index_t(gridDim.x) * Threads) {
    const index_t i = at / units;
    uint4 x{};
    if (i < due) {
      const index_t row =
          chosen.slots ? chosen.slots[offset_t(head) * chosen.stride + counts.packed[head] + i] - counts.stored[head]
                       : i;
      x = reinterpret_cast<const uint4*>(keys ? from.key(0, head, row) : from.value(0, head, row))[at % units];
    }
    reinterpret_cast<uint4*>(keys ? to.key(0, head, i) : to.value(0, head, i))[at % units] = x;
  }
}

/// Puts whole rows behind packed ones that have been turned back, with the positions of all: those of packed rows come
/// from packed_positions [kv_heads, capacity]. Writes the lengths. blockIdx: as above.
template <class View, class To, int Threads>
__global__ void __launch_bounds__(Threads)
    add_whole_entry(const __grid_constant__ View view, const index_t* packed_positions, index_t capacity,
                    const __grid_constant__ To to, index_t* positions, index_t* lengths) {
  const index_t head = index_t(blockIdx.y), held = packed_rows_of(view, head), whole = view.whole.length(0, head);
  const bool keys = blockIdx.z == 0;
  const index_t units = (keys ? To::k_dim : To::v_dim) * index_t(sizeof(typename To::stored_type)) / 16;
  const index_t thread = index_t(blockIdx.x) * Threads + index_t(threadIdx.x), threads = index_t(gridDim.x) * Threads;
  for (index_t at = thread; at < whole * units; at += threads) {
    const index_t i = at / units;
    const auto* from = keys ? view.whole.key(0, head, i) : view.whole.value(0, head, i);
    auto* target = keys ? to.key(0, head, held + i) : to.value(0, head, held + i);
    reinterpret_cast<uint4*>(target)[at % units] = reinterpret_cast<const uint4*>(from)[at % units];
  }
  if (!keys) return;
  index_t* const own = positions + to.position_begin[head];
  for (index_t i = thread; i < held + whole; i += threads)
    own[i] = i < held ? packed_positions[offset_t(head) * capacity + i] : view.whole.position(0, head, i - held);
  if (thread == 0) lengths[head] = held + whole;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
