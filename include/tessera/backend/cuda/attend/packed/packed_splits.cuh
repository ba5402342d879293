// What packed attention is cut into: where parts lie, which chosen rows a split has, and whose bases it fetches.
#pragma once

#include "../../device/warp.cuh"
#include "packed_memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Results of parts: [lanes, parts, rows, v_dim], not divided by the sum, in the basis of the part's segment, whose number is in
/// `segment` [lanes, parts] (none: nothing was there; most_segments: whole rows); most and sum [lanes, parts, rows, 2].
struct packed_parts {
  float *out, *states;
  index_t* segment;
  index_t splits, parts, rows;
};

/// Which of the chosen rows of `count` segments, that begin at `begins`, a split has: about `each`, and of one segment where that leaves
/// enough splits. One that goes on into another segment waits for its queries and rows, as long as for a round of tiles. By a warp.
__device__ __forceinline__ int2 rows_of_split(const index_t* begins, index_t count, index_t each, index_t splits,
                                              index_t split) {
  const index_t lane = index_t(threadIdx.x) % 32;
  for (index_t length = each; length <= each + packed_warps * tile_tokens; length += tile_tokens) {
    int2 own = make_int2(0, 0);
    index_t before = 0;
    for (index_t s = lane; s - lane < count; s += 32) {
      const index_t begin = begins[min(s, count)], end = begins[min(s + 1, count)];
      const index_t parts = ceil_div(end - begin, length), sum = before + inclusive_sum(parts, int(lane));
      const index_t first = begin + (split - (sum - parts)) * length;
      const unsigned found = __ballot_sync(~0u, split >= sum - parts && split < sum);
      if (found != 0) {
        own.x = __shfl_sync(~0u, first, __ffs(int(found)) - 1);
        own.y = __shfl_sync(~0u, min(first + length, end), __ffs(int(found)) - 1);
      }
      before = __shfl_sync(~0u, sum, 31);
    }
    if (before <= splits) return own;
  }
  return make_int2(min(split * each, begins[count]), min(split * each + each, begins[count]));
}

/// Bases of values come to the L2, where the merge finds them: a split's those of some of the `count` segments.
template <class View>
__device__ __forceinline__ void fetch_value_bases(const View& view, index_t sequence, index_t head, index_t count,
                                                  index_t split, index_t splits) {
  for (index_t s = split; s < count; s += splits) {
    const packed_vectors& values = view.segment(sequence, s).v;
    const float* basis = values.basis_of(head, View::v_dim);
    const index_t size = basis ? values.format.channels * View::v_dim : 0;
    for (index_t i = index_t(threadIdx.x) * 32; i < size; i += packed_threads * 32) prefetch_line(basis + i);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
