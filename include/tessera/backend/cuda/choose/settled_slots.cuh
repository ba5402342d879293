// What earlier choices have settled of a turn's prompt, on the GPU: the first slots of every head.
#pragma once

#include <algorithm>

#include "../../../core/prompt_reach.hpp"
#include "../device/check.cuh"
#include "select_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Slots of a head before a position, by one warp: each look leaves a 32nd of what is left.
template <class View>
__device__ index_t slots_before(const View& view, index_t sequence, index_t head, index_t position, int lane) {
  index_t first = 0, last = view.length(sequence, head);  // the answer lies between them
  while (first < last) {
    const index_t n = last - first, each = (n + 31) / 32;
    const index_t end = min((lane + 1) * each, n);  // of this lane's part
    const bool before = view.position(sequence, head, first + end - 1) < position;
    const index_t passed = min(index_t(__popc(__ballot_sync(~0u, before))) * each, n);
    // The next part ends with a slot that is not before.
    last = passed < n ? first + min(passed + each, n) - 1 : last;
    first += passed;
  }
  return first;
}

inline constexpr int settled_threads = 128;

/// A warp a row.
template <class View>
__global__ void __launch_bounds__(settled_threads)
    find_settled_entry(const __grid_constant__ View view, index_t heads, const prompt_reach* reach, index_t* settled,
                       index_t* earlier) {
  const index_t row = index_t(blockIdx.x * settled_threads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= view.sequences * heads) return;
  const prompt_reach at = reach[row / heads];
  const index_t before = slots_before(view, row / heads, row % heads, at.begin, lane);
  const index_t stay = slots_before(view, row / heads, row % heads, at.open, lane);
  if (lane == 0) {
    settled[row] = stay;
    earlier[row] = before;
  }
}

/// Chosen slots count from the first one that competes, and stand where they belong.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    put_settled_first_entry(const __grid_constant__ select_problem p, index_t* counts) {
  const index_t row = blockIdx.y, stay = p.skipped(row), chosen = p.counts[row];
  index_t* behind = p.out_row(row);
  index_t* all = behind - stay;
  const index_t first = index_t(blockIdx.x * Threads + threadIdx.x), step = index_t(gridDim.x) * Threads;
  for (index_t i = first; i < stay; i += step) all[i] = i;
  for (index_t i = first; i < chosen; i += step) behind[i] += stay;
  if (first == 0) counts[row] = stay + chosen;
}

}  // namespace detail

/// How many first slots of every row earlier choices have settled, and how many of them lie before the turn: by position, as
/// the CPU finds them. `heads`: rows of a sequence, kv_heads or 1 where they hold the same slots.
/// Shapes   reach [sequences], settled, earlier [sequences * heads], all on the device.   Cost  one small launch.
template <class View>
void find_settled(const View& view, index_t heads, const prompt_reach* reach, index_t* settled, index_t* earlier,
                  cudaStream_t stream) {
  const index_t rows = view.sequences * heads, rows_of_block = detail::settled_threads / 32;
  detail::find_settled_entry<View><<<unsigned(ceil_div(rows, rows_of_block)), detail::settled_threads, 0, stream>>>(
      view, heads, reach, settled, earlier);
  check(cudaGetLastError(), "launch of find_settled");
}

/// Puts what a selection skipped before what it chose.
/// Shapes   counts [rows], not those of the problem; `kept`: the most slots of a row.
/// Returns  the selection of all that stays.   Cost  one launch.
inline selection_view put_settled_first(const select_problem& problem, index_t kept, index_t* counts,
                                        cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(kept, 1024), 1, 64)), unsigned(problem.rows)};
  detail::put_settled_first_entry<256><<<grid, 256, 0, stream>>>(problem, counts);
  check(cudaGetLastError(), "launch of put_settled_first");
  return {problem.out, counts, problem.out_offsets, problem.out_stride};
}

}  // namespace cuda
TESSERA_NAMESPACE_END
