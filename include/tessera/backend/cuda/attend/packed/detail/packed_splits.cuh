// Blocks that attend packed rows: the layout of their shared memory, and which part of the rows each reads.
#pragma once

#include "../../../device/warp.cuh"
#include "packed_state.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Four blocks per multiprocessor, of 128 registers a thread. Three of 168 take 71 us where four take 64. Two of 8
/// warps take 64 too, but the rest of a step takes 2 us more (256K tokens, batch 4; H200, CUDA 13.0).
inline constexpr int packed_warps = 4, packed_blocks = 4, packed_threads = packed_warps * 32;

/// The sizes that a kernel's memory is made for: channels of the longest rows, and bytes from one raw row to the next.
template <int D, int Dv>
struct packed_lengths {
  int k_channels, v_channels, k_raw, v_raw;
  packed_lengths(const packed_format& k, const packed_format& v)
      : k_channels(int(whole_channels(k.channels))),
        v_channels(int(whole_channels(v.channels))),
        k_raw(int(row_layout<D>::stride(unsigned(value_stride(k.value_bytes()) / 16)))),
        v_raw(int(row_layout<Dv>::stride(unsigned(value_stride(v.value_bytes()) / 16)))) {}
};

/// The layout of a block's shared memory: tiles, raw values, queries, the warps' states, weights, positions of queries,
/// addresses of rows, tables.
template <int D, int Dv, packed_rows_in Memory>
struct packed_memory {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  static constexpr int warp_states = query_rows_together * 2 * 4;
  int parts, tile, k_raw, v_raw, raws, raw, queries, queries_part, states, weight, weights, softmax, softmaxes,
      positions, sources, begins, bytes;

  /// `rows`: of queries.
  TESSERA_HD packed_memory(index_t rows, index_t max_segments, const packed_lengths<D, Dv>& lengths)
      : parts(rows > queries_at_once ? 2 : 1),
        tile(larger(larger(lengths.v_channels * tile_tokens * 2, query_rows_together * Dv * 4),
                    k_rows().bytes() * whole_tokens)),
        k_raw(lengths.k_raw),
        v_raw(lengths.v_raw),
        raws(packed_warps * tile),
        raw(larger((k_raw + v_raw) * tile_tokens, v_rows().bytes() * whole_tokens)),
        queries(raws + packed_warps * raw),
        queries_part(lengths.k_channels * 128),
        states(queries + larger(parts * queries_part, k_rows().bytes() * 2 * query_rows_together)),
        weight(parts * queries_at_once * tile_tokens * 2),
        weights(states + packed_warps * warp_states),
        softmax(parts * (tile_tokens + 1) * 16),
        softmaxes(weights + packed_warps * weight),
        positions(softmaxes + packed_warps * softmax),
        sources(positions + query_rows_together * 4),
        begins(sources + int(sizeof(raw_rows<row_layout<D>, Memory>) + sizeof(raw_rows<row_layout<Dv>, Memory>))),
        bytes(begins + (int(max_segments + 1) * 3 + 2) * 4) {}

 private:
  TESSERA_HD static constexpr int larger(int a, int b) { return a > b ? a : b; }
};

/// Blocks that share the whole rows of a (sequence, kv_head), where these are many.
inline constexpr index_t whole_splits = 16;

/// Results of parts: `out` [lanes, parts, rows, v_dim], not divided by the sum, in the basis of the part's segment.
/// `segment` [lanes, parts] has the number of that segment (none: the part is empty; max_segments: whole rows). The
/// largest logit and the sum are in `states` [lanes, parts, rows, 2]. The last `whole` parts are of whole rows.
struct packed_parts {
  float *out, *states;
  index_t* segment;
  float* tables;  ///< of the blocks that merge, where these do not fit into shared memory; else null
  index_t splits, whole, parts, rows;
};

/// Writes to begins [count + 1] how many chosen rows lie before each of `count` segments, and how many there are in
/// all. `units` [count + 1]: the unit with which each segment begins. `list` has the `all` chosen units, ascending,
/// each of `one` rows; without a list every unit is chosen. All threads of a block call it. `samples` has one number
/// per thread. It ends with a barrier.
__device__ __forceinline__ void find_begins(const index_t* list, index_t all, index_t one, const index_t* units,
                                            index_t count, index_t* samples, index_t* begins) {
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  const index_t step = ceil_div(all, packed_threads), place = index_t(threadIdx.x) * step;
  const bool searches = list && count > 1;  // with one segment there is nothing to look for
  if (searches) samples[threadIdx.x] = place < all ? list[place] : 0x7fffffff;  // behind every unit
  __syncthreads();
#pragma unroll 1
  for (index_t s = warp; s <= count; s += packed_warps) {
    const index_t limit = units[s];
    index_t found = s == count ? all : limit;
    if (searches && s > 0 && s < count) {
      index_t below = 0;  // samples
#pragma unroll
      for (int i = 0; i < packed_threads; i += 32) below += __popc(__ballot_sync(~0u, samples[i + lane] < limit));
      found = (max)(below - 1, 0) * step;
      const index_t end = below > 0 ? (min)(found + step, all) : 0;
#pragma unroll 4
      for (index_t i = found; i < end; i += 32) {
        found += __popc(__ballot_sync(~0u, i + lane < end && list[(min)(i + lane, all - 1)] < limit));
      }
    }
    if (lane == 0) begins[s] = found * one;
  }
  __syncthreads();
}

/// Which of the `all` chosen rows of `count` segments, which begin at `begins`, a split has. A split keeps to the rows
/// of one segment if that leaves enough splits: continuing into another segment means waiting for its queries and rows,
/// as long as a round of tiles takes. A warp calls it.
__device__ __forceinline__ int2 rows_of_split(const index_t* begins, index_t count, index_t all, index_t splits,
                                              index_t split) {
  constexpr index_t round = packed_warps * tile_tokens;  // with fewer rows, some warps have no work
  const index_t lane = index_t(threadIdx.x) % 32;
  const index_t each = (max)(ceil_div(ceil_div(all, splits), tile_tokens) * tile_tokens, round);
  // Each lane tries one length.
  const index_t length_here = each + lane * tile_tokens;
  index_t parts_here = 0;
#pragma unroll 1
  for (index_t s = 0; s < count; ++s) parts_here += ceil_div(begins[s + 1] - begins[s], length_here);
  const unsigned fits = __ballot_sync(~0u, parts_here <= splits && length_here <= each + round);
  if (fits != 0) {
    const index_t length = each + (__ffs(int(fits)) - 1) * tile_tokens;
    index_t s = 0, before = 0;
#pragma unroll 1
    for (; s < count; ++s) {
      const index_t parts = ceil_div(begins[s + 1] - begins[s], length);
      if (split < before + parts) break;
      before += parts;
    }
    if (s == count) return make_int2(all, all);
    const index_t first = begins[s] + (split - before) * length;
    return make_int2(first, (min)(first + length, begins[s + 1]));
  }
  return make_int2((min)(split * each, all), (min)(split * each + each, all));
}

/// Prefetches the bases of values into the L2 for the merge. Each split prefetches the bases of some of the `count`
/// segments.
template <class View>
__device__ __forceinline__ void fetch_value_bases(const View& view, index_t sequence, index_t head, index_t count,
                                                  index_t split, index_t splits) {
#pragma unroll 1
  for (index_t s = split; s < count; s += splits) {
    const packed_vectors& values = view.segment(sequence, s).v;
    const float* basis = values.basis_of(head, View::v_dim);
    const index_t size = basis ? values.format.channels * View::v_dim : 0;
#pragma unroll 1
    for (index_t i = index_t(threadIdx.x) * 32; i < size; i += packed_threads * 32) prefetch_line(basis + i);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
