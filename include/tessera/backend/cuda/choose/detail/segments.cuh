// Text segments among a row's candidates, on the GPU: raising their scores, and choosing in each. One warp handles one
// segment.
#pragma once

#include <algorithm>

#include "../../../../concepts/scorer.hpp"
#include "../../../../core/stored/segment_cursor.hpp"
#include "../../../../core/stored/slot_column.hpp"
#include "../../../../selector/top_tokens.hpp"
#include "../../score/pool.cuh"
#include "../top_k.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The segments of rows of scores: a row is a (sequence, kv_head), or a sequence whose heads choose together and store
/// the same slots.
struct segment_rows {
  slot_column<const index_t> column{};
  index_t kv_heads = 1;     ///< of the segment column
  index_t rows_of_one = 1;  ///< rows of scores per sequence: kv_heads, or 1
  __device__ const index_t* row(index_t r) const { return column.row(r / rows_of_one, r % rows_of_one, kv_heads); }
};

namespace detail {

inline constexpr int segment_warps = 4, segment_threads = segment_warps * 32;

/// The first slot of the segment of `slot`, and the slot behind its last one, among `n` candidates. Whole warps call
/// it.
__device__ inline index_t segment_begin(const index_t* segments, index_t slot, int lane) {
  const index_t own = segments[slot];
  for (;;) {
    const index_t before = slot - 1 - lane;
    const unsigned others = __ballot_sync(~0u, before < 0 || segments[before] != own);
    if (others) return slot - (__ffs(int(others)) - 1);
    slot -= 32;
  }
}
__device__ inline index_t segment_end(const index_t* segments, index_t slot, index_t n, int lane) {
  const index_t own = segments[slot];
  for (;;) {
    const index_t behind = slot + 1 + lane;
    const unsigned others = __ballot_sync(~0u, behind >= n || segments[behind] != own);
    if (others) return slot + __ffs(int(others));
    slot += 32;
  }
}

/// A scorer's description of one segment, on every lane.
template <class Scorer>
__device__ segment_statistics describe(const Scorer& scorer, const float* scores, index_t n, int lane) {
  if constexpr (requires { scorer.describe_segment(warp_team{}, scores, n); }) {
    return scorer.describe_segment(warp_team{}, scores, n);
  } else {
    segment_statistics own{};
    if (lane == 0) own = scorer.describe_segment(scores, n);
    return {__shfl_sync(~0u, own.importance, 0), __shfl_sync(~0u, own.diversity, 0)};
  }
}

/// A warp processes the segments that begin in its 32 slots, so there is no list of them. Without `Writes` it finds the
/// largest importance of a row, as bits that are 0 at first. With `Writes` it describes every segment once more and
/// raises its scores.
template <class Scorer, bool Writes>
__global__ void __launch_bounds__(segment_threads)
    rescore_segments_entry(const __grid_constant__ score_rows in, const __grid_constant__ segment_rows beside,
                           const __grid_constant__ finished_rows out, Scorer scorer, unsigned* largest_of_row) {
  const index_t row = blockIdx.y;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t candidates = (min)(in.candidates(row / in.kv_heads, row % in.kv_heads), out.capacity);
  const index_t* segments = beside.row(row);
  const float* from = in.scores + in.begin(row);
  float* to = out.row(row);
  const float largest = Writes ? bits_as<float>(largest_of_row[row]) : 0.0f;
  float found = 0;
  for (index_t tile = (index_t(blockIdx.x) * segment_warps + warp) * 32; tile < candidates;
       tile += index_t(gridDim.x) * segment_threads) {
    const index_t slot = tile + lane;
    const bool begins = slot < candidates && (slot == 0 || segments[slot] != segments[slot - 1]);
    for (unsigned left = __ballot_sync(~0u, begins); left != 0;) {
      const index_t first = tile + __ffs(int(left)) - 1;
      left &= left - 1;
      const index_t end = left ? tile + __ffs(int(left)) - 1
                               : segment_end(segments, (min)(tile + 31, candidates - 1), candidates, lane);
      const segment_statistics own = describe(scorer, from + first, end - first, lane);
      if constexpr (Writes) {
        for (index_t i = first + lane; i < end; i += 32) to[i] = scorer.rescored(from[i], own, largest);
      } else {
        found = own.importance > found ? own.importance : found;
      }
    }
  }
  // The bits of non-negative floats are ordered like the floats.
  if (!Writes && lane == 0 && found > 0) atomicMax(largest_of_row + row, bits_as<unsigned>(found));
}

/// A warp of the block chooses in one segment. Each warp has memory of its own.
struct segment_memory {
  float scores[max_segment_tokens];
  index_t slots[max_segment_tokens];
  double sums[max_segment_tokens / 2];
};

/// `out` has the best tokens of every row. One warp looks at one of these tokens. If the token is the first of its
/// segment, the warp chooses anew in that segment, as many tokens as the segment has in `out`, and overwrites them.
/// Nothing else of a row moves. Each segment's slots lie side by side in `out`. While one warp writes them, other warps
/// only read which segment they belong to.
template <class Selector>
__global__ void __launch_bounds__(segment_threads)
    choose_in_segments_entry(const __grid_constant__ select_problem p, const __grid_constant__ segment_rows beside,
                             Selector selector) {
  __shared__ segment_memory memory[segment_warps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  segment_memory& own = memory[warp];
  const index_t row = blockIdx.y;
  const auto [n, keep, tail] = p.bounds_of(row);
  const index_t candidates = n - tail, room = keep - tail;
  if (room == candidates) return;  // all of them
  const index_t* segments = beside.row(row) + p.skipped(row);
  const float* scores = p.score_row(row);
  // Other warps write to what is read here. So it is read past the cache, and an earlier read is never reused.
  volatile index_t* best = p.out_row(row);
  for (index_t c = index_t(blockIdx.x) * segment_warps + warp; c < room; c += index_t(gridDim.x) * segment_warps) {
    const index_t slot = best[c], segment = segments[slot];
    if (c > 0 && segments[best[c - 1]] == segment) continue;
    const index_t first = segment_begin(segments, slot, lane), end = segment_end(segments, slot, candidates, lane);
    const index_t length = (min)(end - first, max_segment_tokens);
    index_t won = 1;
    for (unsigned same = ~0u; same == ~0u; won += __popc(same)) {
      const index_t next = c + won + lane;
      same = __ballot_sync(~0u, next < room && best[next] < end);
    }
    if (won >= length) continue;  // the whole segment is chosen already
    for (index_t i = lane; i < length; i += 32) own.scores[i] = scores[first + i];
    __syncwarp();
    if constexpr (requires { selector.choose_in_segment(warp_team{}, own.scores, length, won, own.slots, own.sums); }) {
      selector.choose_in_segment(warp_team{}, own.scores, length, won, own.slots, own.sums);
    } else {
      if (lane == 0) selector.choose_in_segment(own.scores, length, won, own.slots);
    }
    __syncwarp();
    for (index_t i = lane; i < won; i += 32) best[c + i] = first + own.slots[i];
    __syncwarp();
  }
}

}  // namespace detail

/// The last pass of a scorer that sees segments. Equals cpu::rescore_segments up to rounding; sums of statistics are in
/// double.
/// Shapes   out [rows, capacity], or the rows of `in`; largest_of_row [rows], scratch.
/// Cost     two reads of scores and segments.
template <segment_scorer Scorer>
void rescore_segments(const score_rows& in, const segment_rows& segments, const Scorer& scorer, index_t capacity,
                      float* out, unsigned* largest_of_row, cudaStream_t stream) {
  const unsigned rows = unsigned(in.sequences * in.kv_heads);
  const dim3 grid{unsigned(std::clamp(ceil_div(capacity, detail::segment_threads), 1, 1024)), rows};
  const detail::finished_rows to{out, capacity};
  check(cudaMemsetAsync(largest_of_row, 0, rows * sizeof(unsigned), stream), "cudaMemsetAsync");
  detail::rescore_segments_entry<Scorer, false>
      <<<grid, detail::segment_threads, 0, stream>>>(in, segments, to, scorer, largest_of_row);
  detail::rescore_segments_entry<Scorer, true>
      <<<grid, detail::segment_threads, 0, stream>>>(in, segments, to, scorer, largest_of_row);
  check(cudaGetLastError(), "launch of rescore_segments");
}

/// `select_slots` for selectors that see segments: cpu::choose_in_segments. The best tokens decide how many slots each
/// segment gets; the selector decides which.
/// Cost     that of top_tokens, and one warp for every token that is kept.
template <segment_selector Selector>
class select_in_segments {
 public:
  select_in_segments(Selector selector, index_t rows, index_t capacity, const device_info& device, index_t usual_keep)
      : selector_(selector), usual_keep_(usual_keep), best_({}, rows, capacity, device, usual_keep) {
    selector.check();
  }

  void run(const select_problem& problem, const segment_rows& segments, cudaStream_t stream) const {
    best_.run(problem, nullptr, stream);
    const dim3 grid{unsigned(std::clamp(ceil_div(usual_keep_, detail::segment_warps), 1, 1024)),
                    unsigned(problem.rows)};
    if (problem.rows == 0) return;
    detail::choose_in_segments_entry<Selector>
        <<<grid, detail::segment_threads, 0, stream>>>(problem, segments, selector_);
    check(cudaGetLastError(), "launch of choose_in_segments");
  }

 private:
  Selector selector_;
  index_t usual_keep_;
  select_slots<top_tokens> best_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
