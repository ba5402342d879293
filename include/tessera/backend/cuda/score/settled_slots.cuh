// What earlier choices have settled of a turn's prompt, on the GPU: the first slots of every head.
#pragma once

#include "../../../core/prompt/prompt_reach.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Slots of a head before a position, by one warp: each look leaves a 32nd of what is left.
template <class View>
__device__ index_t slots_before(const View& view, index_t sequence, index_t head, index_t position, int lane) {
  index_t first = 0, last = view.length(sequence, head);  // the answer lies between them
  while (first < last) {
    const index_t n = last - first, each = (n + 31) / 32;
    const index_t end = (min)((lane + 1) * each, n);  // of this lane's part
    const bool before = view.position(sequence, head, first + end - 1) < position;
    const index_t passed = (min)(index_t(__popc(__ballot_sync(~0u, before))) * each, n);
    // The next part ends with a slot that is not before.
    last = passed < n ? first + (min)(passed + each, n) - 1 : last;
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

}  // namespace detail

/// How many first slots of every row earlier choices have settled, and how many of them lie before the turn: by
/// position, as the CPU finds them. `heads`: rows of a sequence, kv_heads or 1 where they hold the same slots.
/// Shapes   reach [sequences], settled, earlier [sequences * heads], all on the device.   Cost  one small launch.
template <class View>
void find_settled(const View& view, index_t heads, const prompt_reach* reach, index_t* settled, index_t* earlier,
                  cudaStream_t stream) {
  const index_t rows = view.sequences * heads, rows_of_block = detail::settled_threads / 32;
  detail::find_settled_entry<View><<<unsigned(ceil_div(rows, rows_of_block)), detail::settled_threads, 0, stream>>>(
      view, heads, reach, settled, earlier);
  check(cudaGetLastError(), "launch of find_settled");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
