// Sums of keys by segment of the text, sums of an answer's queries over the segment that it is writing, and scores of
// slots by both.
#pragma once

#include <algorithm>

#include "../../../../concepts/scorer.hpp"
#include "../../../../core/stored/slot_column.hpp"
#include "../../../../core/views.hpp"
#include "../../device/check.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A view on the device whose slots say which segment of the text they belong to.
template <class View>
struct segmented_view : View {
  slot_column<const index_t> segments;  // of what is stored

  /// The segment of a slot. In a view of candidates, `slot` counts candidates.
  TESSERA_HD index_t segment(index_t sequence, index_t head, index_t slot) const {
    const auto& table = this->table;
    if constexpr (requires { table.slots; }) {
      slot = table.slots[table.begin[offset_t(sequence) * this->kv_heads + head] + slot];
    }
    return segments.entry(sequence, head, this->kv_heads, slot);
  }
};

/// For one kv_head: the number of runs of slots of one segment, and the number of slots in all runs.
struct segment_runs {
  index_t runs = 0, slots = 0;
};
/// For one kv_head: the segment that its answer is writing, that segment's tokens so far, the position after them, and
/// the runs that the newest step could choose among. -1: there is no answer yet.
struct spoken_segment {
  index_t segment, tokens, end, runs;
};
/// A sequence's plan.
struct segment_plan {
  index_t read = 0, tail = 0;
  bool operator==(const segment_plan&) const = default;
};

/// What is stored beside the tokens, by entry (layer * sequences + id) and kv_head. Row r = entry * kv_heads + head.
struct segment_index {
  index_t* firsts = nullptr;       ///< [rows, capacity]: a run's first slot
  float* sums = nullptr;           ///< [rows, capacity, k_dim], of a run's keys
  segment_runs* stored = nullptr;  ///< [rows]
  float* queries = nullptr;        ///< [rows, k_dim]: sums of queries, over the group
  spoken_segment* said = nullptr;  ///< [rows]
  index_t first_entry = 0;         ///< the layer's first entry
  const index_t* ids = nullptr;    ///< of the batch
  index_t capacity = 0;            ///< upper bound of a head's slots, and so of its runs

  __device__ offset_t row(index_t sequence, index_t head, index_t kv_heads) const {
    return offset_t(first_entry + ids[sequence]) * kv_heads + head;
  }
};

namespace detail {

inline constexpr int segment_sum_threads = 256;

template <class View>
__device__ __forceinline__ float key_channel(const View& view, index_t b, index_t h, index_t slot, int d) {
  const float stored = float(row_elements(view.key(b, h, slot), d, view.k_strides.dim)[0]);
  if constexpr (View::encoding_type::scaled) return stored * view.key_scale(b, h, slot);
  return stored;
}

/// Finds where runs begin; a block a row.
template <int Threads, class View>
__global__ void __launch_bounds__(Threads) find_runs_entry(const __grid_constant__ View view, segment_index index) {
  __shared__ block_scan<Threads, index_t> scan;
  const index_t b = index_t(blockIdx.x) / view.kv_heads, h = index_t(blockIdx.x) % view.kv_heads;
  const offset_t row = index.row(b, h, view.kv_heads);
  const index_t slots = (min)(view.length(b, h), index.capacity);
  index_t runs = 0;
  for (index_t first = 0; first < slots; first += Threads) {
    const index_t slot = first + index_t(threadIdx.x);
    const bool begins = slot < slots && (slot == 0 || view.segment(b, h, slot) != view.segment(b, h, slot - 1));
    const index_t run = runs + scan.exclusive_sum(index_t(begins));
    if (begins) index.firsts[row * index.capacity + run] = slot;
    runs += scan.total();
    __syncthreads();  // the scan is free again
  }
  if (threadIdx.x == 0) index.stored[row] = {runs, slots};
}

/// blockIdx: x a share of the runs, y a row; a warp a run. Slots are added in order, as new ones are later.
template <class View>
__global__ void __launch_bounds__(segment_sum_threads)
    sum_runs_entry(const __grid_constant__ View view, segment_index index) {
  constexpr int warps = segment_sum_threads / 32, lane_channels = (View::k_dim + 31) / 32;
  const index_t b = index_t(blockIdx.y) / view.kv_heads, h = index_t(blockIdx.y) % view.kv_heads;
  const offset_t row = index.row(b, h, view.kv_heads);
  const segment_runs stored = index.stored[row];
  const index_t* firsts = index.firsts + row * index.capacity;
  const int lane = threadIdx.x % 32;
  for (index_t run = index_t(blockIdx.x * warps + threadIdx.x / 32); run < stored.runs;
       run += index_t(gridDim.x) * warps) {
    const index_t end = run + 1 < stored.runs ? firsts[run + 1] : stored.slots;
    float sum[lane_channels] = {};
#pragma unroll 4
    for (index_t slot = firsts[run]; slot < end; ++slot) {
#pragma unroll
      for (int i = 0; i < lane_channels; ++i) {
        if (i * 32 + lane < View::k_dim) sum[i] += key_channel(view, b, h, slot, i * 32 + lane);
      }
    }
#pragma unroll
    for (int i = 0; i < lane_channels; ++i) {
      if (i * 32 + lane < View::k_dim) index.sums[(row * index.capacity + run) * View::k_dim + i * 32 + lane] = sum[i];
    }
  }
}

/// What a step reads, by row of the batch: the number of slots, and the number of newest slots that are always read.
struct segment_bounds {
  index_t *keep, *tail;
};

/// Adds new slots to the runs, and a step's queries to the segment that is being written. A block a row; each thread
/// has channels of its own.
template <class View, class T>
__global__ void __launch_bounds__(segment_sum_threads)
    hear_step_entry(const __grid_constant__ View view, const __grid_constant__ rows_view<const T> q,
                    const index_t* first_position, const segment_plan* plans, index_t whole, segment_index index,
                    segment_bounds out) {
  constexpr int k_dim = View::k_dim;
  const index_t heads = view.kv_heads, b = index_t(blockIdx.x) / heads, h = index_t(blockIdx.x) % heads;
  const index_t group = q.heads / heads, first = first_position[b], slots = (min)(view.length(b, h), index.capacity);
  const offset_t row = index.row(b, h, heads);
  const spoken_segment previous = index.said[row];
  segment_runs stored = index.stored[row];
  for (; stored.slots < slots; ++stored.slots) {
    const index_t slot = stored.slots;
    const bool begins = slot == 0 || view.segment(b, h, slot) != view.segment(b, h, slot - 1);
    if (begins && threadIdx.x == 0) index.firsts[row * index.capacity + stored.runs] = slot;
    stored.runs += begins;
    float* sums = index.sums + (row * index.capacity + stored.runs - 1) * k_dim;
    for (int d = threadIdx.x; d < k_dim; d += segment_sum_threads)
      sums[d] = (begins ? 0.0f : sums[d]) + key_channel(view, b, h, slot, d);
  }
  // The step's tokens in the newest segment, as head 0 stores them: every head stores a step's tokens.
  const index_t newest = view.length(b, 0) - 1, segment = view.segment(b, 0, newest);
  index_t own = 1;
  while (own < q.tokens && own <= newest && view.segment(b, 0, newest - own) == segment) ++own;
  const bool goes_on = previous.end == first && previous.segment == segment;
  const index_t tokens = own + (goes_on ? previous.tokens : 0);
  for (int d = threadIdx.x; d < k_dim; d += segment_sum_threads) {
    float sum = goes_on ? index.queries[row * k_dim + d] : 0.0f;
    for (index_t t = q.tokens - own; t < q.tokens; ++t) {
      for (index_t g = 0; g < group; ++g) sum += float(q.row(b, t, h * group + g)[d]);
    }
    index.queries[row * k_dim + d] = sum;
  }
  __syncthreads();  // all have read the old values
  if (threadIdx.x > 0) return;
  const segment_plan plan = plans[b];
  const index_t step =
      q.tokens > 1 ? q.tokens : 0;  // a step of several tokens reads them all, so that each of them sees something
  const bool everything = tokens <= whole;
  index.stored[row] = stored;
  index.said[row] = {segment, tokens, first + q.tokens, everything ? 0 : stored.runs};
  out.keep[blockIdx.x] = everything ? slots : (max)(plan.read, step);
  out.tail[blockIdx.x] = everything ? slots : (max)(plan.tail, step);
}

/// blockIdx: x a share of the runs, y a row; one warp per run. A run's slots get as score the logit of its mean key and
/// the mean query.
template <class View, class Scorer>
__global__ void __launch_bounds__(segment_sum_threads)
    score_runs_entry(const __grid_constant__ View view, Scorer scorer, float scale, segment_index index, float* scores,
                     offset_t row_stride) {
  constexpr int warps = segment_sum_threads / 32, k_dim = View::k_dim;
  const index_t b = index_t(blockIdx.y) / view.kv_heads, h = index_t(blockIdx.y) % view.kv_heads;
  const offset_t row = index.row(b, h, view.kv_heads);
  const segment_runs stored = index.stored[row];
  const spoken_segment said = index.said[row];
  if (said.runs == 0) return;  // everything is read
  const index_t* firsts = index.firsts + row * index.capacity;
  const float *query = index.queries + row * k_dim, per_token = scale / float(said.tokens);
  const int lane = threadIdx.x % 32;
  for (index_t run = index_t(blockIdx.x * warps + threadIdx.x / 32); run < stored.runs;
       run += index_t(gridDim.x) * warps) {
    const float* sums = index.sums + (row * index.capacity + run) * k_dim;
    float dot = 0;
#pragma unroll
    for (int d = lane; d < k_dim; d += 32) dot += query[d] * sums[d];
    dot = warp_sum(dot);
    const index_t first = firsts[run], end = run + 1 < stored.runs ? firsts[run + 1] : stored.slots;
    const float own = scorer.weigh(per_token * dot / float(end - first), 0);
    for (index_t slot = first + lane; slot < end; slot += 32)
      scores[blockIdx.y * row_stride + slot] = slot < scorer.start ? infinity : own;
  }
}

}  // namespace detail

/// Maintains sums of keys by segment, and scores a step's slots by them: the device's part of a segment_mean_scorer.
/// Only launches: recordable.   Cost  a mean key a segment and step; every key once where runs are found anew.
template <class View, segment_mean_scorer Scorer>
class segment_means {
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;

 public:
  /// Finds the runs of a view anew: a prompt has ended, or slots have moved.
  void build(const View& view, const segment_index& index, cudaStream_t stream) const {
    const unsigned rows = unsigned(view.sequences * view.kv_heads);
    detail::find_runs_entry<1024><<<rows, 1024, 0, stream>>>(view, index);
    detail::sum_runs_entry<<<dim3(shares(index), rows), detail::segment_sum_threads, 0, stream>>>(view, index);
    check(cudaGetLastError(), "launch of segment sums");
  }

  /// Adds a step's tokens, which the view has already, and its queries to the sums. Then every slot gets its segment's
  /// score, and every row its counts. Shapes   scores [rows, row_stride]; plans [sequences].
  void score(const View& view, const Scorer& scorer, float scale, const rows_view<const T>& q, const index_t* first,
             const segment_plan* plans, const segment_index& index, float* scores, offset_t row_stride,
             const detail::segment_bounds& bounds, cudaStream_t stream) const {
    const unsigned rows = unsigned(view.sequences * view.kv_heads);
    detail::hear_step_entry<<<rows, detail::segment_sum_threads, 0, stream>>>(view, q, first, plans, scorer.whole,
                                                                              index, bounds);
    detail::score_runs_entry<<<dim3(shares(index), rows), detail::segment_sum_threads, 0, stream>>>(
        view, scorer, scale, index, scores, row_stride);
    check(cudaGetLastError(), "launch of segment scores");
  }

 private:
  /// Blocks of a row: as if a run had four slots, a turn of every warp.
  static unsigned shares(const segment_index& index) {
    return unsigned(std::clamp(ceil_div(index.capacity, 4 * detail::segment_sum_threads / 32), 1, 64));
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
