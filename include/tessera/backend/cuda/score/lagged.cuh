// Scores beside the tokens behind, on the GPU: a block measures partitions against the next ones and ranks them.
#pragma once

#include <algorithm>

#include "../device/tuning.cuh"
#include "partitions.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View, class Scorer>
__global__ void __launch_bounds__(contents_threads)
    score_outside_entry(const __grid_constant__ View view, Scorer scorer, float* scores, offset_t row_stride) {
  const index_t row = blockIdx.y, stored = view.length(row / view.kv_heads, row % view.kv_heads);
  for (index_t i = index_t(blockIdx.x * contents_threads + threadIdx.x); i < stored;
       i += index_t(gridDim.x) * contents_threads)
    scores[row * row_stride + i] = scorer.outside(i, stored);
}

/// Writes the spreads of a lane's rows base + u * rows + group; `memory` has their partition's scales.
template <class Partitions, class Scorer, class Memory, int Count>
__device__ __forceinline__ void measure_rows(const Partitions& all, const Scorer& scorer, const Memory& memory,
                                             index_t base, const typename Partitions::raw (&chunk)[Count],
                                             float* spreads) {
  using chunks = typename Partitions::chunks;
  constexpr int measures = Scorer::measures;
  const int lane = Partitions::lane();
  float sums[Count][measures] = {}, parts[measures][Count];
#pragma unroll
  for (int d = 0; d < contents_chunk; ++d) {
    const channel_scale scale = memory.scales[d][lane < chunks::chunks ? lane : 0];
#pragma unroll
    for (int u = 0; u < Count; ++u) scorer.measure(chunks::value(chunk[u], d), scale, sums[u]);
  }
  float own[measures];
#pragma unroll
  for (int m = 0; m < measures; ++m) {
#pragma unroll
    for (int u = 0; u < Count; ++u) parts[m][u] = lane < chunks::chunks ? sums[u][m] : 0.0f;
    own[m] = lanes_sums<chunks::lanes>(parts[m], lane);
  }
  const index_t row = base + lane * chunks::rows + Partitions::group();
  if (lane < Count && all.holds(row)) spreads[row] = scorer.spread(own, chunks::dim);
}

/// Writes the spreads of `count` partitions from slot `first` on, which a next one follows, to spreads [count * lag]. Threads hold
/// their rows of a partition from when its extremes are found to when it is measured.
template <bool Keys, bool Whole, class View, class Scorer, class Memory>
__device__ void measure_spreads(const View& view, const Scorer& scorer, index_t b, index_t h, index_t first,
                                index_t count, bool aligned, Memory& memory, void* shared, float* spreads) {
  using partitions = partition_rows<View, Keys, Whole>;
  using chunks = typename partitions::chunks;
  using extremes = lane_extremes<chunks>;
  constexpr int rows = chunks::rows, at_once = partitions::at_once;
  const index_t group = partitions::group();
  partitions all(view, b, h, first, scorer.lag, aligned, shared);
  for (index_t p = 0; p < lagged_ahead; ++p) all.bring(p, p <= count);
  typename partitions::raw held[at_once], next[at_once];
  wait_copies<lagged_ahead - 1>();
  all.take(0, held);
  all.bring(lagged_ahead, lagged_ahead <= count);
  for (index_t p = 0; p < count; ++p, spreads += all.lag()) {
    wait_copies<lagged_ahead - 1>();
    all.take(p + 1, next);
    extremes seen;
#pragma unroll
    for (int w = 0; w < extremes::cells; ++w) seen.low[w] = seen.both(infinity), seen.high[w] = seen.both(-infinity);
#pragma unroll
    for (int u = 0; u < at_once; ++u) {
      if (all.holds(u * rows + group)) seen.see(next[u]);
    }
    all.bring(p + 1 + lagged_ahead, p + 1 + lagged_ahead <= count);
    all.each_other(p + 1, [&](index_t base, const auto& chunk) {
#pragma unroll
      for (int u = 0; u < partitions::few; ++u) {
        if (all.holds(base + u * rows + group)) seen.see(chunk[u]);
      }
    });
    memory.join(seen, scorer);
    measure_rows(all, scorer, memory, 0, held, spreads);
    all.each_other(p,
                   [&](index_t base, const auto& chunk) { measure_rows(all, scorer, memory, base, chunk, spreads); });
#pragma unroll
    for (int u = 0; u < at_once; ++u) held[u] = next[u];
  }
}

/// Half of each softmax of a partition's spreads, which take the spreads' place; a warp's work.
__device__ inline void halve_softmax(float* spreads, index_t lag) {
  const index_t lane = threadIdx.x % 32;
  float top = -infinity, total = 0;
  for (index_t i = lane; i < lag; i += 32) top = spreads[i] < infinity ? fmaxf(top, spreads[i]) : top;
  top = warp_max(top);
  for (index_t i = lane; i < lag; i += 32) {
    const float power = spreads[i] < infinity ? expf(spreads[i] - top) : nanf("");
    spreads[i] = power;
    total += power == power ? power : 0.0f;
  }
  total = warp_sum(total);
  for (index_t i = lane; i < lag; i += 32) spreads[i] = spreads[i] / total / 2;
}

/// Writes what a partition's slots come to: how many rank behind each of them; a warp's work. `values` becomes what they rank by: sums
/// are not negative, so their bits order as they do, and -1 stands for NaN.
template <class Scorer>
__device__ void rank_partition(const Scorer& scorer, const float* keys, float* values, float* out) {
  constexpr int at_once = 4, absent = -2;
  const index_t lane = threadIdx.x % 32, lag = scorer.lag;
  int* ranked_by = reinterpret_cast<int*>(values);
  for (index_t i = lane; i < lag; i += 32) {
    const float sum = keys[i] + values[i];
    ranked_by[i] = sum == sum ? __float_as_int(sum) : -1;
  }
  __syncwarp();
  for (index_t first = 0; first < lag; first += 32 * at_once) {
    int own[at_once], behind[at_once] = {}, limit[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) own[k] = first + k * 32 + lane < lag ? ranked_by[first + k * 32 + lane] : absent;
    for (index_t others = 0; others < lag; others += 32) {
#pragma unroll
      for (int k = 0; k < at_once; ++k) limit[k] = own[k] + (others > first + k * 32);  // of equals the later is behind
      const index_t there = min(32, lag - others);
#pragma unroll 8
      for (index_t j = 0; j < there; ++j) {
        const int other = ranked_by[others + j];
#pragma unroll
        for (int k = 0; k < at_once; ++k) behind[k] += other < limit[k];
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      behind[k] += __popc(__match_any_sync(~0u, own[k]) & (~1u << lane));  // equals among the warp's own
      const index_t i = first + k * 32 + lane;
      if (i < lag) out[i] = own[k] >= 0 ? scorer.ranked(behind[k]) : nanf("");
    }
  }
}

/// x runs of `run` partitions, y a (sequence, kv_head). `scratch` [rows, 2, capacity].
template <class View, class Scorer, bool Whole>
__global__ void __launch_bounds__(lagged_threads, lagged_blocks)
    score_lagged_entry(const __grid_constant__ View view, Scorer scorer, bool keys_aligned, bool values_aligned,
                       float* out, offset_t row_stride, float* scratch, index_t capacity, index_t run) {
  using of_keys_type = partition_scales<typename partition_rows<View, true, Whole>::chunks>;
  using of_values_type = partition_scales<typename partition_rows<View, false, Whole>::chunks>;
  constexpr std::size_t most =
      sizeof(of_keys_type) > sizeof(of_values_type) ? sizeof(of_keys_type) : sizeof(of_values_type);
  __shared__ alignas(16) unsigned char memory[most];
  extern __shared__ uint4 lagged_rows[];
  if constexpr (Whole) scorer.lag = partition_rows<View, true, Whole>::staged;
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads, lag = scorer.lag;
  const index_t partitions = max(0, min(view.length(b, h), capacity) - scorer.sinks) / lag;
  for (index_t p = index_t(blockIdx.x) * run; p + 1 < partitions; p += index_t(gridDim.x) * run) {
    const index_t count = min(run, partitions - 1 - p), first = scorer.sinks + p * lag;
    float *of_keys = scratch + offset_t(row) * 2 * capacity + p * lag, *of_values = of_keys + capacity;
    measure_spreads<true, Whole>(view, scorer, b, h, first, count, keys_aligned,
                                 *reinterpret_cast<of_keys_type*>(memory), lagged_rows, of_keys);
    __syncthreads();
    measure_spreads<false, Whole>(view, scorer, b, h, first, count, values_aligned,
                                  *reinterpret_cast<of_values_type*>(memory), lagged_rows, of_values);
    __syncthreads();
    for (index_t i = threadIdx.x / 32; i < count; i += lagged_threads / 32) {
      halve_softmax(of_keys + i * lag, lag);
      halve_softmax(of_values + i * lag, lag);
      rank_partition(scorer, of_keys + i * lag, of_values + i * lag, out + row * row_stride + first + i * lag);
    }
    __syncthreads();
  }
}

}  // namespace detail

/// Writes the scores of all stored slots beside the tokens behind them: the device's cpu::score_lagged, to rounding of the
/// spreads.
/// Shapes   scores [rows, row_stride].   Workspace  two numbers a slot.   Cost  one read of K and of V, and of a run's last
/// partition once more; lag comparisons a token.
template <class View, lagged_scorer Scorer>
class score_lagged {
 public:
  score_lagged(index_t rows, index_t capacity)
      : rows_(rows), capacity_(capacity), resident_(detail::lagged_blocks * device_info::current().multiprocessors) {
    require(rows >= 1 && rows <= 65535, "sequences * kv_heads", rows, "1 to 65535", "split the batch");
    // The limit belongs to the kernel, not to this object: always the same.
    for (const entry_type entry : {whole_, any_})
      check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
            "cudaFuncSetAttribute");
  }

  std::size_t workspace_bytes() const { return std::size_t(rows_) * 2 * std::size_t(capacity_) * sizeof(float); }

  void run(const View& view, const Scorer& scorer, float* scores, offset_t row_stride, void* workspace,
           cudaStream_t stream) const {
    const index_t rows = view.sequences * view.kv_heads;
    require(rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "construct score_lagged for the largest batch");
    require(scorer.lag >= 2 && scorer.sinks >= 0, "lag and sinks",
            std::to_string(scorer.lag) + " and " + std::to_string(scorer.sinks), "at least 2, and at least 0",
            "check the scorer first");
    if (rows == 0) return;
    const dim3 all{unsigned(std::clamp(ceil_div(capacity_, 2048), 1, 64)), unsigned(rows)};
    detail::score_outside_entry<View, Scorer>
        <<<all, detail::contents_threads, 0, stream>>>(view, scorer, scores, row_stride);
    // Runs for all blocks that fit at a time: what a block begins with it waits for.
    const index_t partitions = std::max(capacity_ / scorer.lag, 1);
    const index_t run = index_t(std::clamp<offset_t>(offset_t(partitions) * rows / resident_, 1, 32));
    const dim3 runs{unsigned(std::min(ceil_div(partitions, run), 65535)), unsigned(rows)};
    const bool keys_aligned = rows_on_16_bytes(view.k, view.k_strides),
               values_aligned = rows_on_16_bytes(view.v, view.v_strides);
    const entry_type entry =
        scorer.lag == whole_lag && keys_aligned && values_aligned && keys::side_by_side ? whole_ : any_;
    entry<<<runs, detail::lagged_threads, shared_bytes, stream>>>(
        view, scorer, keys_aligned, values_aligned, scores, row_stride, static_cast<float*>(workspace), capacity_, run);
    check(cudaGetLastError(), "launch of score_lagged");
  }

 private:
  using keys = detail::partition_rows<View, true, true>;
  using values = detail::partition_rows<View, false, true>;
  using entry_type = void (*)(View, Scorer, bool, bool, float*, offset_t, float*, index_t, index_t);
  static constexpr int shared_bytes = keys::shared_bytes;
  /// Partitions of which the places hold all rows, of keys and of values; 0: of none.
  static constexpr index_t whole_lag = keys::staged == values::staged ? keys::staged : 0;

  index_t rows_, capacity_, resident_;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  entry_type whole_ = detail::score_lagged_entry<View, Scorer, keys::side_by_side>,
             any_ = detail::score_lagged_entry<View, Scorer, false>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
