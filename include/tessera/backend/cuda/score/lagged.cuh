// Scores beside the tokens behind, on the GPU: a block measures partitions against the next ones and ranks them.
#pragma once

#include <algorithm>

#include "../device/tuning.cuh"
#include "lagged/columns.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

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

/// Writes the spreads of `count` partitions from slot `first` on, which a next one follows, to spreads [count * lag].
/// Threads hold their rows of a partition from when its extremes are found to when it is measured.
template <bool Keys, class View, class Scorer, class Memory>
__device__ void measure_spreads(const View& view, const Scorer& scorer, index_t b, index_t h, index_t first,
                                index_t count, bool aligned, Memory& memory, void* shared, float* spreads) {
  using partitions = partition_rows<View, Keys>;
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

/// x runs of `run` partitions, y a (sequence, kv_head). `scratch` [rows, 2, capacity].
template <class View, class Scorer>
__global__ void __launch_bounds__(lagged_threads, lagged_blocks)
    score_lagged_entry(const __grid_constant__ View view, Scorer scorer, bool keys_aligned, bool values_aligned,
                       float* out, offset_t row_stride, float* scratch, index_t capacity, index_t run) {
  using of_keys_type = partition_scales<typename partition_rows<View, true>::chunks>;
  using of_values_type = partition_scales<typename partition_rows<View, false>::chunks>;
  constexpr std::size_t most =
      sizeof(of_keys_type) > sizeof(of_values_type) ? sizeof(of_keys_type) : sizeof(of_values_type);
  __shared__ alignas(16) unsigned char memory[most];
  extern __shared__ uint4 lagged_rows[];
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads, lag = scorer.lag;
  const index_t stored = view.length(b, h), partitions = (max)(0, (min)(stored, capacity) - scorer.sinks) / lag;
  out += row * row_stride;
  for (index_t p = index_t(blockIdx.x) * run; p + 1 < partitions; p += index_t(gridDim.x) * run) {
    const index_t count = (min)(run, partitions - 1 - p), first = scorer.sinks + p * lag;
    float *of_keys = scratch + offset_t(row) * 2 * capacity + p * lag, *of_values = of_keys + capacity;
    measure_spreads<true>(view, scorer, b, h, first, count, keys_aligned, *reinterpret_cast<of_keys_type*>(memory),
                          lagged_rows, of_keys);
    __syncthreads();
    measure_spreads<false>(view, scorer, b, h, first, count, values_aligned, *reinterpret_cast<of_values_type*>(memory),
                           lagged_rows, of_values);
    __syncthreads();
    rank_run(scorer, of_keys, of_values, count, out + first);
    __syncthreads();
  }
  score_outside(scorer, stored, (max)(0, partitions - 1) * lag, out);
}

}  // namespace detail

/// Writes the scores of all stored slots beside the tokens behind them: the device's cpu::score_lagged, to rounding of
/// the spreads.
/// Shapes   scores [rows, row_stride].   Workspace  two numbers a slot.   Cost  one read of K and of V, and of a run's
///          last
/// partition once more; lag comparisons a token.
template <class View, lagged_scorer Scorer>
class score_lagged {
 public:
  score_lagged(index_t rows, index_t capacity)
      : rows_(rows), capacity_(capacity), resident_(detail::lagged_blocks * device_info::current().multiprocessors) {
    require(rows >= 1 && rows <= 65535, "sequences * kv_heads", rows, "1 to 65535", "split the batch");
    // The limit belongs to the kernel, not to this object: always the same.
    const auto allow = [](auto entry, int bytes) {
      check(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
    };
    allow(any_, any_bytes);
    if constexpr (columns::possible) allow(columns_, columns::shared_bytes);
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
    // Runs for all blocks that fit at a time: what a block begins with it waits for.
    const index_t partitions = (std::max)(capacity_ / scorer.lag, 1);
    const index_t run = index_t(std::clamp<offset_t>(offset_t(partitions) * rows / resident_, 1, 32));
    const dim3 runs{unsigned((std::min)(ceil_div(partitions, run), 65535)), unsigned(rows)};
    const bool keys_aligned = rows_on_16_bytes(view.k, view.k_strides),
               values_aligned = rows_on_16_bytes(view.v, view.v_strides);
    bool in_columns = false;
    if constexpr (columns::possible) {
      in_columns = scorer.lag == columns::lag && keys_aligned && values_aligned;
      if (in_columns) {
        columns_<<<runs, detail::lagged_threads, columns::shared_bytes, stream>>>(
            view, scorer, scores, row_stride, static_cast<float*>(workspace), capacity_, run);
      }
    }
    if (!in_columns) {
      any_<<<runs, detail::lagged_threads, any_bytes, stream>>>(view, scorer, keys_aligned, values_aligned, scores,
                                                                row_stride, static_cast<float*>(workspace), capacity_,
                                                                run);
    }
    check(cudaGetLastError(), "launch of score_lagged");
  }

 private:
  using columns = detail::lagged_columns<View>;
  static constexpr int any_bytes = detail::partition_rows<View, true>::shared_bytes;
  template <class V>
  static constexpr auto columns_entry() {
    if constexpr (detail::lagged_columns<V>::possible) {
      return detail::score_columns_entry<V, Scorer>;
    } else {
      return nullptr;
    }
  }

  index_t rows_, capacity_, resident_;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*any_)(View, Scorer, bool, bool, float*, offset_t, float*, index_t,
               index_t) = detail::score_lagged_entry<View, Scorer>;
  void (*columns_)(View, Scorer, float*, offset_t, float*, index_t, index_t) = columns_entry<View>();
};

}  // namespace cuda
TESSERA_NAMESPACE_END
