// The first index from which a condition holds, by one thread or by one warp.
#pragma once

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The first i in [0, count) for which `holds(i)`, or `count`. Once it holds, it holds for all later indices. By one
/// thread.
template <class Holds>
__device__ __forceinline__ index_t first_where(index_t count, const Holds& holds) {
  index_t low = 0;
  while (low < count) {
    const index_t middle = low + (count - low) / 2;
    if (holds(middle))
      count = middle;
    else
      low = middle + 1;
  }
  return low;
}

/// The same by one warp, 32 probes a round: one trip to memory for 32 items, two for 1,024, three for 32,768.
template <class Holds>
__device__ __forceinline__ index_t first_where_in_warp(index_t count, int lane, const Holds& holds) {
  index_t low = 0, size = count;  // the answer lies in [low, low + size]
  while (size > 0) {
    const index_t step = (size + 31) / 32, probe = low + (min)((lane + 1) * step, size) - 1;
    const unsigned before = __ballot_sync(~0u, !holds(probe));
    if (before == ~0u) return low + size;
    const index_t skip = index_t(__popc(before)) * step;  // probes ascend, so `before` is a run of low bits
    low += skip;
    size = (min)(step - 1, size - skip);
  }
  return low;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
