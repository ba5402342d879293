// A scorer's last pass over its scores on the GPU: pooling over neighbouring tokens, or the scorer's own body.
#pragma once

#include <algorithm>

#include "../../../concepts/scorer.hpp"
#include "../device/alignment.cuh"
#include "../device/tuning.cuh"
#include "score_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int pool_threads = 256;
inline constexpr int pool_tile = 2048;
inline constexpr int widest_pool = 255;

struct finished_rows {
  float* data;
  index_t capacity;
  __device__ float* row(index_t r) const { return data + offset_t(r) * capacity; }
};

/// Outputs of a tile and the neighbours on both sides are staged once. Maxima grow by doubling: a window of odd width
/// is two overlapping windows whose width is a power of two, so the cost grows with log2(kernel), not with kernel.
/// Means are summed in slot order, as on the host: with a running sum, a score would depend on every earlier one.
template <pooling How>
__global__ void __launch_bounds__(pool_threads)
    pool_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, index_t kernel) {
  constexpr int staged = pool_tile + widest_pool - 1, each = (staged + pool_threads - 1) / pool_threads;
  __shared__ float window[each * pool_threads];
  const index_t row = blockIdx.y, half = kernel / 2;
  const index_t candidates = (min)(in.candidates(row / in.kv_heads, row % in.kv_heads), out.capacity);
  const float* from = in.scores + in.begin(row);
  float* to = out.row(row);
  constexpr bool maximum = How == pooling::max;
  for (index_t first = index_t(blockIdx.x) * pool_tile; first < candidates; first += index_t(gridDim.x) * pool_tile) {
    for (int i = threadIdx.x; i < pool_tile + kernel - 1; i += pool_threads) {
      const index_t slot = first + i - half;
      float value = maximum ? -infinity : 0.0f;
      if (slot >= 0 && slot < candidates) {
        const float score = from[slot];
        if (maximum ? score == score : score - score == 0) value = score;
      }
      window[i] = value;
    }
    __syncthreads();
    int width = 1;
    if (maximum) {
      for (; width * 2 <= kernel; width *= 2) {
        float grown[each];
#pragma unroll
        for (int j = 0; j < each; ++j) {
          const int i = threadIdx.x + j * pool_threads;
          grown[j] = i + width < pool_tile + kernel - 1 ? fmaxf(window[i], window[i + width]) : -infinity;
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < each; ++j) {
          if (int(threadIdx.x) + j * pool_threads + width < pool_tile + kernel - 1)
            window[threadIdx.x + j * pool_threads] = grown[j];
        }
        __syncthreads();
      }
    }
    for (int i = threadIdx.x; i < pool_tile && first + i < candidates; i += pool_threads) {
      const float own = from[first + i];
      float value;
      if (maximum) {
        value = own == own ? fmaxf(window[i], window[i + kernel - width]) : -infinity;
      } else {
        float sum = 0;
        for (int j = 0; j < kernel; ++j) sum += window[i + j];
        value = own - own == 0 ? sum / float(kernel) : -infinity;
      }
      to[first + i] = value;
    }
    __syncthreads();
  }
}

template <class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    finish_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, Scorer scorer) {
  const index_t row = blockIdx.y;
  const index_t candidates = (min)(in.candidates(row / in.kv_heads, row % in.kv_heads), out.capacity);
  const float* from = in.scores + in.begin(row);
  float* to = out.row(row);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < candidates; i += index_t(gridDim.x) * Threads)
    to[i] = scorer.finish_at(from, candidates, i);
}

}  // namespace detail

/// A scorer's last pass over the candidates of every row. For a scorer without such a pass it does nothing.
///
/// Same bits as max_pool and average_pool on the host. A NaN ranks last and does not affect its neighbours.
/// Shapes   out [rows, capacity], not the memory of `in`; slots of the protected tail are not written.
/// Errors   an even kernel, or one outside 1 to 255: tessera::error before anything is launched.
/// Cost     one launch, no workspace; scores are read and written once.
template <class Scorer>
class finish_scores {
  static_assert(check_device_scorer<Scorer>());

 public:
  /// Whether there is anything to do. If not, `out` is not used.
  static constexpr bool changes = pooling_scorer<Scorer> || slot_finishing_scorer<Scorer>;

  finish_scores(index_t sequences, index_t kv_heads, index_t capacity, const device_info& device)
      : rows_(sequences * kv_heads), capacity_(capacity) {
    require(rows_ >= 1 && rows_ <= 65535, "sequences * kv_heads", rows_, "1 to 65535", "split the batch");
    blocks_ =
        (std::max)(1, (std::min)(ceil_div(capacity, detail::pool_tile), ceil_div(8 * device.multiprocessors, rows_)));
  }

  /// Numbers that the pass writes: none where it changes nothing.
  std::size_t out_scores() const { return changes ? std::size_t(rows_) * std::size_t(capacity_) : 0; }

  /// Whether this scorer's last pass leaves every score unchanged, except NaN, which ranks as -infinity either way.
  static bool leaves_scores([[maybe_unused]] const Scorer& scorer) {
    if constexpr (pooling_scorer<Scorer>) {
      const pooling_window window = scorer.pooled();
      return window.kernel == 1 && window.kind == pooling::max;
    } else {
      return !changes;
    }
  }

  /// The finished scores: `in`, or its rows in `out`.
  score_rows run(const score_rows& in, const Scorer& scorer, float* out, cudaStream_t stream) const {
    if constexpr (!changes) {
      return in;
    } else {
      const dim3 grid{unsigned(blocks_), unsigned(in.sequences * in.kv_heads)};
      const detail::finished_rows to{out, capacity_};
      if constexpr (pooling_scorer<Scorer>) {
        const pooling_window window = scorer.pooled();
        require(window.kernel >= 1 && window.kernel % 2 == 1 && window.kernel <= detail::widest_pool, "pool",
                window.kernel, "an odd number, 1 to " + std::to_string(detail::widest_pool), "pass 1 for no pooling");
        const auto entry =
            window.kind == pooling::max ? detail::pool_entry<pooling::max> : detail::pool_entry<pooling::average>;
        entry<<<grid, detail::pool_threads, 0, stream>>>(in, to, window.kernel);
      } else {
        detail::finish_entry<Scorer, detail::pool_threads><<<grid, detail::pool_threads, 0, stream>>>(in, to, scorer);
      }
      check(cudaGetLastError(), "launch of finish_scores");
      score_rows finished = in;
      finished.scores = out;
      finished.offsets = nullptr;
      finished.row_stride = capacity_;
      return finished;
    }
  }

 private:
  index_t rows_, capacity_;
  int blocks_ = 1;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
