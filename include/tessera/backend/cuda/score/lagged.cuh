// Scores beside the tokens behind, on the GPU: a block measures one partition against the next one and ranks it.
#pragma once

#include <algorithm>

#include "../../../math/ordered.hpp"
#include "contents.cuh"

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

/// A number over all threads of a block, on each of them; ends with a barrier, and needs one before.
template <class Join>
__device__ float over_block(float* meeting, float mine, const Join& join) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) meeting[warp] = mine;
  __syncthreads();
  float all = meeting[0];
  for (int w = 1; w < contents_threads / 32; ++w) all = join(all, meeting[w]);
  __syncthreads();
  return all;
}

/// Adds half of each slot's softmax of spreads over its partition to `scores`; spreads, scores [lag].
template <bool Keys, class View, class Scorer>
__device__ void add_spreads(const View& view, const Scorer& scorer, index_t b, index_t h, index_t first, bool aligned,
                            float* memory, float* meeting, float* spreads, float* scores, bool begins) {
  using chunks = stored_chunks<View, Keys>;
  constexpr int rows = chunks::rows, dim = chunks::dim;
  const int lane = threadIdx.x % chunks::lanes, group = threadIdx.x / chunks::lanes;
  const index_t lag = scorer.lag;
  float *lows = memory, *highs = memory + rows * dim;  // [rows, dim] each; the first rows hold the result
  float low[contents_chunk], high[contents_chunk];
#pragma unroll
  for (int d = 0; d < contents_chunk; ++d) low[d] = infinity, high[d] = -infinity;
  typename chunks::raw chunk;
  for (index_t i = group; i < lag; i += rows) {
    chunks::fetch(view, b, h, first + lag + i, aligned, lane, true, chunk);
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) {
      const float x = chunks::value(chunk, d);
      if (x - x != 0) continue;
      low[d] = fminf(low[d], x), high[d] = fmaxf(high[d], x);
    }
  }
  if (lane < chunks::chunks) {
#pragma unroll
    for (int d = 0; d < contents_chunk; ++d) {
      lows[group * dim + lane * contents_chunk + d] = low[d];
      highs[group * dim + lane * contents_chunk + d] = high[d];
    }
  }
  __syncthreads();
  for (int d = threadIdx.x; d < dim; d += contents_threads) {
    for (int g = 1; g < rows; ++g) {
      lows[d] = fminf(lows[d], lows[g * dim + d]);
      highs[d] = fmaxf(highs[d], highs[g * dim + d]);
    }
  }
  __syncthreads();
  float top = -infinity;
  for (index_t base = 0; base < lag; base += rows) {  // all lanes meet in it
    const index_t i = base + group;
    chunks::fetch(view, b, h, first + i, aligned, lane, i < lag, chunk);
    float sums[Scorer::measures] = {};
    if (lane < chunks::chunks) {
#pragma unroll
      for (int d = 0; d < contents_chunk; ++d) {
        const int c = lane * contents_chunk + d;
        scorer.measure(chunks::value(chunk, d), lows[c], highs[c], sums);
      }
    }
#pragma unroll
    for (int m = 0; m < Scorer::measures; ++m) sums[m] = chunks::row_sum(sums[m]);
    if (i < lag && lane == 0) {
      const float spread = scorer.spread(sums, dim);
      spreads[i] = spread;
      if (spread < infinity) top = fmaxf(top, spread);
    }
  }
  top = over_block(meeting, warp_max(top), [](float x, float y) { return fmaxf(x, y); });
  float total = 0;
  for (index_t i = threadIdx.x; i < lag; i += contents_threads) {
    const float spread = spreads[i], power = spread < infinity ? expf(spread - top) : nanf("");
    spreads[i] = power;
    total += power == power ? power : 0.0f;
  }
  total = over_block(meeting, warp_sum(total), [](float x, float y) { return x + y; });
  for (index_t i = threadIdx.x; i < lag; i += contents_threads) {
    scores[i] = (begins ? 0.0f : scores[i]) + spreads[i] / total / 2;
  }
  __syncthreads();
}

/// x partitions, y a (sequence, kv_head). `scratch` [rows, 2, capacity].
template <class View, class Scorer>
__global__ void __launch_bounds__(contents_threads)
    score_lagged_entry(const __grid_constant__ View view, Scorer scorer, bool keys_aligned, bool values_aligned,
                       float* out, offset_t row_stride, float* scratch, index_t capacity) {
  using keys = stored_chunks<View, true>;
  using values = stored_chunks<View, false>;
  constexpr int most =
      keys::rows * keys::dim > values::rows * values::dim ? keys::rows * keys::dim : values::rows * values::dim;
  __shared__ float memory[2 * most], meeting[contents_threads / 32];
  const index_t row = blockIdx.y, b = row / view.kv_heads, h = row % view.kv_heads, lag = scorer.lag;
  const index_t partitions = max(0, min(view.length(b, h), capacity) - scorer.sinks) / lag;
  for (index_t p = blockIdx.x; p + 1 < partitions; p += index_t(gridDim.x)) {
    const index_t first = scorer.sinks + p * lag;
    float *spreads = scratch + offset_t(row) * 2 * capacity + first, *scores = spreads + capacity;
    add_spreads<true>(view, scorer, b, h, first, keys_aligned, memory, meeting, spreads, scores, true);
    add_spreads<false>(view, scorer, b, h, first, values_aligned, memory, meeting, spreads, scores, false);
    for (index_t i = threadIdx.x; i < lag; i += contents_threads) {
      const float own = scores[i];
      const std::uint64_t key = rank_key(own, i);
      index_t behind = 0;
      for (index_t j = 0; j < lag; ++j) behind += rank_key(scores[j], j) < key;
      out[row * row_stride + first + i] = own == own ? scorer.ranked(behind) : own;
    }
    __syncthreads();
  }
}

}  // namespace detail

/// Writes the scores of all stored slots beside the tokens behind them: the device's cpu::score_lagged, to rounding of the
/// spreads.
/// Shapes   scores [rows, row_stride].   Workspace  two numbers a slot.   Cost  two reads of K and of V; lag comparisons a
/// token.
template <class View, lagged_scorer Scorer>
class score_lagged {
 public:
  score_lagged(index_t rows, index_t capacity) : rows_(rows), capacity_(capacity) {
    require(rows >= 1 && rows <= 65535, "sequences * kv_heads", rows, "1 to 65535", "split the batch");
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
    const dim3 partitions{unsigned(std::clamp(capacity_ / scorer.lag, 1, 65535)), unsigned(rows)};
    detail::score_lagged_entry<View, Scorer><<<partitions, detail::contents_threads, 0, stream>>>(
        view, scorer, rows_on_16_bytes(view.k, view.k_strides), rows_on_16_bytes(view.v, view.v_strides), scores,
        row_stride, static_cast<float*>(workspace), capacity_);
    check(cudaGetLastError(), "launch of score_lagged");
  }

 private:
  index_t rows_, capacity_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
