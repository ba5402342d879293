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

/// Writes the spreads of `count` partitions from slot `first` on, which a next one follows, to spreads [count * lag].
template <bool Keys, class View, class Scorer, class Memory>
__device__ void measure_spreads(const View& view, const Scorer& scorer, index_t b, index_t h, index_t first,
                                index_t count, bool aligned, Memory& memory, void* shared, float* spreads) {
  using partitions = partition_rows<View, Keys>;
  using chunks = typename partitions::chunks;
  constexpr int rows = chunks::rows, dim = chunks::dim, at_once = partitions::at_once, measures = Scorer::measures;
  const int lane = partitions::lane(), group = partitions::group();
  const index_t lag = scorer.lag;
  partitions all(view, b, h, first, lag, aligned, shared);
  all.bring(0);
  all.bring(1);
  for (index_t p = 0; p < count; ++p, spreads += lag) {
    if (lagged_ahead > 2) {
      p + 2 <= count ? all.bring(p + 2) : commit_copies();
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    lane_extremes<chunks> seen;
#pragma unroll
    for (int w = 0; w < lane_extremes<chunks>::cells; ++w)
      seen.low[w] = seen.both(infinity), seen.high[w] = seen.both(-infinity);
    all.each(
        p + 1,
        [&](index_t base, int u, const auto& chunk) {
          if (base + u * rows + group < lag) seen.see(chunk);
        },
        [](index_t) {});
    memory.join(seen, scorer);
    channel_scale scales[contents_chunk];
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d)
      scales[d] = lane < chunks::chunks ? memory.scales[d][lane] : channel_scale{};
    float parts[measures][at_once];
    all.each(
        p,
        [&](index_t, int u, const auto& chunk) {
          float sums[measures] = {};
#pragma unroll
          for (int d = 0; d < contents_chunk; ++d) scorer.measure(chunks::value(chunk, d), scales[d], sums);
#pragma unroll
          for (int m = 0; m < measures; ++m) parts[m][u] = lane < chunks::chunks ? sums[m] : 0.0f;
        },
        [&](index_t base) {
          float sums[measures];
#pragma unroll
          for (int m = 0; m < measures; ++m) sums[m] = lanes_sums<chunks::lanes>(parts[m], lane);
          const index_t own = base + lane * rows + group;
          if (lane < at_once && own < lag) spreads[own] = scorer.spread(sums, dim);
        });
    if (lagged_ahead == 2 && p + 2 <= count) all.bring(p + 2);
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
  const index_t partitions = max(0, min(view.length(b, h), capacity) - scorer.sinks) / lag;
  for (index_t p = index_t(blockIdx.x) * run; p + 1 < partitions; p += index_t(gridDim.x) * run) {
    const index_t count = min(run, partitions - 1 - p), first = scorer.sinks + p * lag;
    float *of_keys = scratch + offset_t(row) * 2 * capacity + p * lag, *of_values = of_keys + capacity;
    measure_spreads<true>(view, scorer, b, h, first, count, keys_aligned, *reinterpret_cast<of_keys_type*>(memory),
                          lagged_rows, of_keys);
    __syncthreads();
    measure_spreads<false>(view, scorer, b, h, first, count, values_aligned, *reinterpret_cast<of_values_type*>(memory),
                           lagged_rows, of_values);
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
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
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
    entry_<<<runs, detail::lagged_threads, shared_bytes, stream>>>(
        view, scorer, rows_on_16_bytes(view.k, view.k_strides), rows_on_16_bytes(view.v, view.v_strides), scores,
        row_stride, static_cast<float*>(workspace), capacity_, run);
    check(cudaGetLastError(), "launch of score_lagged");
  }

 private:
  static constexpr int shared_bytes = detail::partition_rows<View, true>::shared_bytes;

  index_t rows_, capacity_, resident_;
  void (*entry_)(View, Scorer, bool, bool, float*, offset_t, float*, index_t,
                 index_t) = detail::score_lagged_entry<View, Scorer>;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
