// The scores of a batch on the device, in the form that pooling, budgets and selectors read.
#pragma once

#include "../../../core/prompt/prompt_reach.hpp"
#include "../../../core/types.hpp"
#include "../../../core/views.hpp"
#include "../device/check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Scores of every stored slot by row = sequence * kv_heads + head: the device's layer_scores. Every pointer is a
/// device pointer. The newest `tail` slots of a row are kept whatever their score; the others are its candidates.
struct score_rows {
  struct batch_strides {
    offset_t sequence = 0;
    offset_t head = 0;
  };

  const float* scores = nullptr;
  const offset_t* offsets = nullptr;  ///< [rows], where a row begins; null: row * row_stride
  offset_t row_stride = 0;
  index_t sequences = 0;
  index_t kv_heads = 0;
  const index_t* lengths = nullptr;  ///< as kv_view has them
  batch_strides length_strides{};
  index_t tail = 0;
  const index_t* tails = nullptr;       ///< [sequences], instead of `tail` if turns differ; null: one for all
  const index_t* budgets = nullptr;     ///< [sequences], instead of the budget's tokens if plans differ; null: the same
  const index_t* settled = nullptr;     ///< [rows], a row's first slots that are kept and do not compete; null: none
  const index_t* earlier = nullptr;     ///< [rows], how many of those are from earlier turns; given with `settled`
  const prompt_reach* reach = nullptr;  ///< [sequences]; given with `settled`

  TESSERA_HD offset_t begin(index_t row) const { return offsets ? offsets[row] : row * row_stride; }
  TESSERA_HD index_t tokens(index_t sequence, index_t head) const {
    return lengths[sequence * length_strides.sequence + head * length_strides.head];
  }
  TESSERA_HD index_t protected_tail(index_t sequence) const { return tails ? tails[sequence] : tail; }
  TESSERA_HD index_t longest(index_t sequence) const {
    index_t most = 0;
    for (index_t h = 0; h < kv_heads; ++h) {
      const index_t stored = tokens(sequence, h);
      most = stored > most ? stored : most;
    }
    return most;
  }
  TESSERA_HD index_t candidates(index_t sequence, index_t head) const {
    const index_t stored = tokens(sequence, head), kept = protected_tail(sequence);
    return stored > kept ? stored - kept : 0;
  }
  TESSERA_HD index_t settled_of(index_t row) const { return settled ? settled[row] : 0; }
};

// The slots of a turn's prompt that earlier choices have settled, on the GPU: the first slots of every head.

namespace detail {

/// How many slots of a head lie before a position, by one warp. Each probe narrows the range to a 32nd.
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

/// One warp per row.
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

/// Counts the first slots of every row that earlier choices have settled, and how many of those are from earlier turns.
/// It counts by position, as the CPU does. `heads`: rows of a sequence; kv_heads, or 1 if all heads have the same
/// slots.
/// Shapes   reach [sequences], settled, earlier [sequences * heads], all on the device.
/// Cost     one small launch.
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
