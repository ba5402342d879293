// Scores that are weighted by values once it is known how many tokens a head keeps, on the GPU.
#pragma once

#include <algorithm>

#include "../../../concepts/scorer.hpp"
#include "../../../selector/top_tokens.hpp"
#include "../score/pool.cuh"
#include "top_k.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// A thread a row: how many candidates there are, and how many of them are taken by the scores alone.
template <class Scorer>
__global__ void __launch_bounds__(128) count_first_entry(const __grid_constant__ score_rows in, Scorer scorer,
                                                         const index_t* kept, index_t* candidates, index_t* first) {
  const index_t row = index_t(blockIdx.x * 128 + threadIdx.x);
  if (row >= in.sequences * in.kv_heads) return;
  const index_t b = row / in.kv_heads, n = in.candidates(b, row % in.kv_heads), stay = (min)(in.settled_of(row), n);
  candidates[row] = n;
  first[row] = stay + (min)((max)(scorer.taken_first(kept[row] - stay) - in.protected_tail(b), 0), n - stay);
}

template <class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    weigh_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, Scorer scorer,
                const float* weights, offset_t weight_stride) {
  const index_t row = blockIdx.y;
  const index_t candidates = (min)(in.candidates(row / in.kv_heads, row % in.kv_heads), out.capacity);
  const float *from = in.scores + in.begin(row), *own = weights + row * weight_stride;
  float* to = out.row(row);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < candidates; i += index_t(gridDim.x) * Threads)
    to[i] = scorer.weighted(from[i], own[i]);
}

/// What is taken first ranks before everything else.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    rank_first_entry(const __grid_constant__ select_problem first, const __grid_constant__ finished_rows out) {
  const index_t row = blockIdx.y, count = first.counts[row];
  const index_t* slots = first.out_row(row);
  float* scores = out.row(row) + first.skipped(row);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    scores[slots[i]] = infinity;
}

}  // namespace detail

/// The device's cpu::weigh_scores over the rows of a batch.
/// Workspace  `kept` slots and three numbers a row.   Cost  one selection, one pass over scores and weights.
template <weighted_scorer Scorer>
class weigh_scores {
 public:
  weigh_scores(index_t rows, index_t capacity, index_t kept, const device_info& device)
      : rows_(rows), capacity_(capacity), kept_(kept), best_({}, rows, capacity, device, kept) {}

  std::size_t workspace_bytes() const {
    return array_bytes<index_t>(std::size_t(rows_) * 3) + array_bytes<index_t>(std::size_t(rows_) * std::size_t(kept_));
  }

  /// counts: what each row keeps, tail and what is settled included; weights [rows, weight_stride]; out [rows,
  /// capacity], or the rows of `in`.
  void run(const score_rows& in, const Scorer& scorer, const index_t* counts, const float* weights,
           offset_t weight_stride, float* out, void* workspace, cudaStream_t stream) const {
    auto* numbers = static_cast<index_t*>(workspace);
    const index_t rows = in.sequences * in.kv_heads;
    index_t *candidates = numbers, *first = numbers + rows_;
    detail::count_first_entry<Scorer>
        <<<unsigned(ceil_div(rows, 128)), 128, 0, stream>>>(in, scorer, counts, candidates, first);
    select_problem problem;
    problem.scores = in.scores;
    problem.score_stride = in.row_stride;
    problem.score_offsets = in.offsets;
    problem.n = {candidates};
    problem.keep = {first};
    problem.skip = in.settled;
    problem.out = reinterpret_cast<index_t*>(static_cast<unsigned char*>(workspace) +
                                             array_bytes<index_t>(std::size_t(rows_) * 3));
    problem.out_stride = kept_;
    problem.counts = numbers + 2 * rows_;
    problem.rows = rows;
    best_.run(problem, nullptr, stream);
    const detail::finished_rows to{out, capacity_};
    const dim3 grid{unsigned(std::clamp(ceil_div(capacity_, 1024), 1, 256)), unsigned(rows)};
    detail::weigh_entry<Scorer, 256><<<grid, 256, 0, stream>>>(in, to, scorer, weights, weight_stride);
    detail::rank_first_entry<256><<<dim3(8, unsigned(rows)), 256, 0, stream>>>(problem, to);
    check(cudaGetLastError(), "launch of weigh_scores");
  }

 private:
  index_t rows_, capacity_, kept_;
  select_slots<top_tokens> best_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
