// Scorer's last pass, budget and selection over a batch, on the device: what every kv_head keeps.
#pragma once

#include <algorithm>
#include <limits>

#include "../../../recipe.hpp"
#include "../score/pool.cuh"
#include "allot.cuh"
#include "top_k.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class Scorer, int Threads>
__global__ void __launch_bounds__(Threads)
    score_positions_entry(const __grid_constant__ score_rows in, const index_t* positions, const offset_t* begins,
                          const index_t* next_position, Scorer scorer, float* scores) {
  const index_t row = blockIdx.y, sequence = row / in.kv_heads;
  const index_t tokens = in.tokens(sequence, row % in.kv_heads), next = next_position[sequence];
  for (index_t i = index_t(blockIdx.x) * Threads + index_t(threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads)
    scores[in.begin(row) + i] = scorer.score(positions[begins[row] + i], next);
}

}  // namespace detail

/// What a layer can keep at most, known before its scores are: of one head, and of all heads of a sequence.
struct kept_bound {
  index_t longest;
  offset_t total;
};

/// Bounds of what `allot` gives to heads of which the longest holds `longest` tokens.
inline kept_bound bound_kept(const uniform& budget, index_t, index_t, index_t tail, index_t heads, index_t longest) {
  const index_t most = std::min(longest, std::max(budget.tokens, tail));
  return {most, offset_t(heads) * most};
}
inline kept_bound bound_kept(const adaptive& budget, index_t, index_t, index_t tail, index_t heads, index_t longest) {
  // Rounding moves a head by less than one token.
  const offset_t total = offset_t(heads) * (offset_t(std::max(budget.tokens, tail)) + 1);
  return {index_t(std::min<offset_t>(longest, total)), std::min(offset_t(heads) * longest, total)};
}
inline kept_bound bound_kept(const pyramid& budget, index_t layer, index_t layers, index_t tail, index_t heads,
                             index_t longest) {
  const index_t base = std::max(0, budget.tokens - tail), depth = budget.layers > 0 ? budget.layers : layers;
  const index_t at = budget.layer >= 0 ? budget.layer : layer;
  // The steepest line, or a flatter one through the base; steps are rounded down, so late layers get a little more.
  const auto steepest = budget.plan(depth, base, std::numeric_limits<index_t>::max());
  const index_t kept = std::max(base, steepest.most - at * steepest.step) + depth;
  const index_t most = std::min(longest, std::max(budget.tokens, tail + kept));
  return {most, offset_t(heads) * most};
}

/// Chooses what every (sequence, kv_head) of a batch keeps: the device's cpu::choose_kept, with its results.
///
/// No allocation, no synchronisation, no length on the host.
/// Errors   shapes and parameters that make no sense: tessera::error before anything is launched.
/// Cost     one launch for pooling where the scorer pools, one to four for the budget, one for the selection.
template <class Retain>
class choose_kept {
  using scorer = typename Retain::scorer_type;
  using budget = typename Retain::budget_type;
  using finish = finish_scores<scorer>;

 public:
  /// `kept`: the most tokens that a head keeps.
  choose_kept(const Retain& policy, index_t sequences, index_t kv_heads, index_t capacity, index_t kept,
              const device_info& device)
      : rows_(sequences * kv_heads),
        capacity_(capacity),
        kept_(kept),
        finish_(sequences, kv_heads, capacity, device),
        allot_(sequences, kv_heads, capacity, device),
        select_(policy.selector, rows_, capacity, device, std::min(kept, policy.budget.tokens)) {}

  std::size_t workspace_bytes() const {
    return indices_at() + std::size_t(rows_) * std::size_t(kept_) * sizeof(index_t);
  }

  /// Row r of the result begins at r * kept; it lies in the workspace. With `in.offsets`, `finished` rows lie like those
  /// of `in`; scorers that pool need scores by row stride.
  selection_view run(const Retain& policy, const score_rows& in, index_t layer, index_t layers, void* workspace,
                     cudaStream_t stream) const {
    auto* bytes = static_cast<unsigned char*>(workspace);
    score_rows scores = in;
    if constexpr (finish::pools) {
      float* finished = reinterpret_cast<float*>(bytes + finished_at());
      require(!in.offsets && in.row_stride <= capacity_, "stride of the score rows", in.row_stride,
              "at most the capacity, which is " + std::to_string(capacity_), "score into rows of the capacity");
      finish_.run(in, policy.scorer, finished, stream);
      scores.scores = finished;
    }
    auto* counts = reinterpret_cast<index_t*>(bytes + counts_at());
    allot_.run(scores, policy.budget, layer, layers, counts, bytes, stream);
    select_problem problem;
    problem.scores = scores.scores;
    problem.score_stride = scores.row_stride;
    problem.score_offsets = scores.offsets;
    problem.n = {scores.lengths};
    problem.keep = {counts};
    problem.tail = {scores.tails, scores.tail, scores.kv_heads};
    problem.out = reinterpret_cast<index_t*>(bytes + indices_at());
    problem.out_stride = kept_;
    problem.counts = counts + rows_;
    select_.run(problem, nullptr, stream);
    return problem.chosen();
  }

 private:
  std::size_t counts_at() const { return padded(allot_.workspace_bytes()); }
  std::size_t finished_at() const { return counts_at() + padded(std::size_t(rows_) * 2 * sizeof(index_t)); }
  std::size_t indices_at() const {
    return finished_at() + (finish::pools ? padded(std::size_t(rows_) * std::size_t(capacity_) * sizeof(float)) : 0);
  }

  index_t rows_, capacity_, kept_;
  finish finish_;
  allot<budget> allot_;
  select_slots<typename Retain::selector_type> select_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
