// How chosen slots become the lists that steps read: copied, with columns that join them; and how many slots lists
// share.
#pragma once

#include "../../../../core/selection.hpp"
#include "../../choose/lines/joined_columns.cuh"
#include "../../device/launch.cuh"
#include "../../device/search.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Lists of one layer and one place in the group, row = sequence of the batch * kv_heads + head.
struct list_rows {
  const offset_t* begins;
  index_t* slots;
  index_t* counts;
  index_t kv_heads;
  const index_t* ids;  // by sequence, of the columns; null: the sequence itself
  // Query heads whose columns join the list of head h: from h * group + first on, so many.
  index_t group, first, joining;
};

/// x: a part of a row, y: a row. A selection without indices is everything.
template <int Threads>
__global__ void __launch_bounds__(Threads) pass_entry(selection_view chosen, list_rows to) {
  wait_for_earlier();
  let_later_begin();
  const index_t row = blockIdx.y, count = chosen.count(row);
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    to.slots[to.begins[row] + i] = chosen.indices ? chosen.row(row)[i] : i;
  if (blockIdx.x == 0 && threadIdx.x == 0) to.counts[row] = count;
}

/// The same, joined with columns: a block a row, which goes through the slots 32 * Threads at a time as bits.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    pass_joined_entry(selection_view chosen, list_rows to, joined_columns columns) {
  __shared__ std::uint32_t words[Threads];
  __shared__ block_scan<Threads, index_t> scan;
  const index_t row = blockIdx.x, sequence = row / to.kv_heads, head = row % to.kv_heads;
  const index_t count = chosen.count(row), thread = index_t(threadIdx.x);
  const index_t* list = chosen.row(row);
  const offset_t id = to.ids ? to.ids[sequence] : sequence;
  const std::uint32_t* bits =
      columns.bits + ((id * to.kv_heads + head) * to.group + to.first) * offset_t(columns.words);
  index_t* out = to.slots + to.begins[row];
  index_t taken = 0, written = 0;
  for (index_t word = 0; word < columns.words; word += Threads) {
    std::uint32_t mine = 0;
    for (index_t g = 0; word + thread < columns.words && g < to.joining; ++g)
      mine |= bits[g * offset_t(columns.words) + word + thread];
    words[thread] = mine;
    __syncthreads();
    const index_t end = first_where(count, [&](index_t i) { return list[i] / 32 >= word + Threads; });
    for (index_t i = taken + thread; i < end; i += Threads)
      atomicOr(&words[list[i] / 32 - word], std::uint32_t(1) << list[i] % 32);
    taken = end;
    __syncthreads();
    mine = words[thread];
    index_t at = written + scan.before(__popc(mine));
    written += scan.total();
    for (; mine != 0; mine &= mine - 1) out[at++] = (word + thread) * 32 + __ffs(int(mine)) - 1;
    __syncthreads();  // the scan's memory and the words are free again
  }
  if (thread == 0) to.counts[row] = written;
}

/// Slots that are in any of `lists` ascending lists of each row, and entries that all of them have; the lists' counts
/// lie `stride` rows apart, and so do the begins. Writes both by id: to [ids, kv_heads].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_read_entry(list_rows from, index_t lists, offset_t stride, index_t* distinct, index_t* entries) {
  __shared__ block_scan<Threads, index_t> scan;
  wait_for_earlier();
  let_later_begin();
  const index_t row = blockIdx.x;
  index_t found = 0;
  for (index_t l = 0; l < lists; ++l) {
    const index_t* list = from.slots + from.begins[l * stride + row];
    for (index_t i = index_t(threadIdx.x); i < from.counts[l * stride + row]; i += Threads) {
      bool is_new = true;
      for (index_t before = 0; before < l && is_new; ++before) {
        const index_t* other = from.slots + from.begins[before * stride + row];
        const index_t count = from.counts[before * stride + row];
        const index_t at = first_where(count, [&](index_t j) { return other[j] >= list[i]; });
        is_new = at == count || other[at] != list[i];
      }
      found += is_new;
    }
  }
  scan.before(found);
  const index_t total = scan.total();
  if (threadIdx.x != 0) return;
  const offset_t at = offset_t(from.ids[row / from.kv_heads]) * from.kv_heads + row % from.kv_heads;
  distinct[at] = total;
  entries[at] = 0;
  for (index_t l = 0; l < lists; ++l) entries[at] += from.counts[l * stride + row];
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
