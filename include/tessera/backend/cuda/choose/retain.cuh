// Scorer's last pass, budget and selection over a batch, on the device: what every kv_head keeps.
#pragma once

#include <algorithm>

#include "../../../recipe.hpp"
#include "../score/pool.cuh"
#include "allot.cuh"
#include "plain_select.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
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
        kept_(kept),
        finish_(sequences, kv_heads, capacity, device),
        allot_(sequences, kv_heads, capacity, device),
        select_(policy.selector, rows_, capacity, device, std::min(kept, policy.budget.tokens)) {}

  std::size_t workspace_bytes() const {
    return indices_at() + std::size_t(rows_) * std::size_t(kept_) * sizeof(index_t);
  }

  /// Row r of the result begins at r * kept; it lies in the workspace. `in` may have fewer sequences than this object was
  /// made for; where their plans differ, `in.budgets` and `in.tails` say how, by sequence.
  selection_view run(const Retain& policy, const score_rows& in, index_t layer, index_t layers, void* workspace,
                     cudaStream_t stream) const {
    auto* bytes = static_cast<unsigned char*>(workspace);
    const score_rows scores = finish_.run(in, policy.scorer, reinterpret_cast<float*>(bytes + finished_at()), stream);
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
    problem.rows = scores.sequences * scores.kv_heads;
    select_.run(problem, nullptr, stream);
    return problem.chosen();
  }

 private:
  std::size_t counts_at() const { return padded(allot_.workspace_bytes()); }
  std::size_t finished_at() const { return counts_at() + array_bytes<index_t>(std::size_t(rows_) * 2); }
  std::size_t indices_at() const { return finished_at() + finish_.out_bytes(); }

  index_t rows_, kept_;
  finish finish_;
  allot<budget> allot_;
  select_slots<typename Retain::selector_type> select_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
