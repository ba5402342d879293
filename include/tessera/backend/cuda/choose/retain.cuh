// Scorer's last pass, budget and selection over a batch, on the device: what every kv_head keeps.
#pragma once

#include <algorithm>

#include "../../../recipe.hpp"
#include "../score/pool.cuh"
#include "allot.cuh"
#include "plain_select.cuh"
#include "segments.cuh"
#include "weigh.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What scorers and selectors may see of a batch's slots beside their scores, on the device.
struct slot_facts {
  segment_rows segments{};
  const float* weights = nullptr;   ///< [rows, weight_stride]
  const index_t* counts = nullptr;  ///< [rows], what each keeps, in place of the budget's
  offset_t weight_stride = 0;
};

namespace detail {

/// Chosen slots count from the first one that competes, and stand where they belong.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    put_settled_first_entry(const __grid_constant__ select_problem p, index_t* counts) {
  const index_t row = blockIdx.y, stay = p.skipped(row), chosen = p.counts[row];
  index_t* behind = p.out_row(row);
  index_t* all = behind - stay;
  const index_t first = index_t(blockIdx.x * Threads + threadIdx.x), step = index_t(gridDim.x) * Threads;
  for (index_t i = first; i < stay; i += step) all[i] = i;
  for (index_t i = first; i < chosen; i += step) behind[i] += stay;
  if (first == 0) counts[row] = stay + chosen;
}

/// In place of weigh_scores where nothing is weighed.
struct no_weights {
  no_weights(index_t, index_t, index_t, const device_info&) {}
  std::size_t workspace_bytes() const { return 0; }
};
template <class Scorer>
struct weights_of {
  using type = no_weights;
};
template <weighted_scorer Scorer>
struct weights_of<Scorer> {
  using type = weigh_scores<Scorer>;
};
template <class Selector>
struct selection_of {
  using type = select_slots<Selector>;
};
template <segment_selector Selector>
struct selection_of<Selector> {
  using type = select_in_segments<Selector>;
};

}  // namespace detail

/// Puts what a selection skipped before what it chose.
/// Shapes   counts [rows], not those of the problem; `kept`: the most slots of a row.
/// Returns  the selection of all that stays.   Cost  one launch.
inline selection_view put_settled_first(const select_problem& problem, index_t kept, index_t* counts,
                                        cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(kept, 1024), 1, 64)), unsigned(problem.rows)};
  detail::put_settled_first_entry<256><<<grid, 256, 0, stream>>>(problem, counts);
  check(cudaGetLastError(), "launch of put_settled_first");
  return {problem.out, counts, problem.out_offsets, problem.out_stride};
}

/// Chooses what every (sequence, kv_head) of a batch keeps: the device's cpu::choose_kept, with its results.
///
/// No allocation, no synchronisation, no length on the host.
/// Errors   shapes and parameters that make no sense: tessera::error before anything is launched.
/// Settled slots stay: budgets count them, selectors see the slots behind them.
/// Cost     one launch for pooling where the scorer pools over more than one token, two where it sees segments, one to
///          four for the budget, one for the selection, one more in segments and one where slots are settled; weights:
///          see weigh_scores.
template <class Retain>
class choose_kept {
  using scorer = typename Retain::scorer_type;
  using budget = typename Retain::budget_type;
  using finish = finish_scores<scorer>;
  using weigh = typename detail::weights_of<scorer>::type;
  using select = typename detail::selection_of<typename Retain::selector_type>::type;
  static constexpr bool in_segments = segment_selector<typename Retain::selector_type>;
  /// Whether scores change once more, so that rows are needed even where the scorer has no last pass of its own.
  static constexpr bool changes_again = segment_scorer<scorer> || weighted_scorer<scorer>;

 public:
  /// `kept`: the most tokens that a head keeps.
  choose_kept(const Retain& policy, index_t sequences, index_t kv_heads, index_t capacity, index_t kept,
              const device_info& device)
      : rows_(sequences * kv_heads),
        capacity_(capacity),
        kept_(kept),
        finish_(sequences, kv_heads, capacity, device),
        allot_(sequences, kv_heads, capacity, device, policy.budget),
        weigh_(rows_, capacity, kept, device),
        select_(policy.selector, rows_, capacity, device, (std::min)(kept, policy.budget.tokens)) {}

  std::size_t workspace_bytes() const {
    return indices_at() + std::size_t(rows_) * std::size_t(kept_) * sizeof(index_t);
  }

  /// Row r of the result begins at r * kept; it lies in the workspace. `in` may have fewer sequences than this object
  /// was made for; where their plans differ, `in.budgets` and `in.tails` say how, by sequence.
  selection_view run(const Retain& policy, const score_rows& in, index_t layer, index_t layers, void* workspace,
                     cudaStream_t stream, const slot_facts& beside = {}) const {
    auto* bytes = static_cast<unsigned char*>(workspace);
    auto* finished = reinterpret_cast<float*>(bytes + finished_at());
    // Budgets and selectors know what a NaN is; what changes scores once more wants it gone.
    const bool as_they_are = !changes_again && finish::leaves_scores(policy.scorer);
    score_rows scores = as_they_are ? in : finish_.run(in, policy.scorer, finished, stream);
    const auto changed = [&] {
      scores.scores = finished;
      scores.offsets = nullptr;
      scores.row_stride = capacity_;
    };
    if constexpr (segment_scorer<scorer>) {
      rescore_segments(scores, beside.segments, policy.scorer, capacity_, finished,
                       reinterpret_cast<unsigned*>(bytes + most_at()), stream);
      changed();
    }
    auto* counts = reinterpret_cast<index_t*>(bytes + counts_at());
    if (beside.counts) {
      check(cudaMemcpyAsync(counts, beside.counts, std::size_t(scores.sequences * scores.kv_heads) * sizeof(index_t),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
    } else {
      allot_.run(scores, policy.budget, layer, layers, counts, bytes, stream);
    }
    if constexpr (weighted_scorer<scorer>) {
      weigh_.run(scores, policy.scorer, counts, beside.weights, beside.weight_stride, finished, bytes + weigh_at(),
                 stream);
      changed();
    }
    select_problem problem;
    problem.scores = scores.scores;
    problem.score_stride = scores.row_stride;
    problem.score_offsets = scores.offsets;
    problem.n = {scores.lengths};
    problem.keep = {counts};
    problem.tail = {scores.tails, scores.tail, scores.kv_heads};
    problem.skip = scores.settled;
    problem.out = reinterpret_cast<index_t*>(bytes + indices_at());
    problem.out_stride = kept_;
    problem.counts = counts + rows_;
    problem.rows = scores.sequences * scores.kv_heads;
    // Lengths of rows of their own lie side by side; a row for a whole sequence has those of its first head.
    problem.n.stride = index_t(scores.kv_heads > 1 ? 1 : (std::max<offset_t>)(1, scores.length_strides.sequence));
    if constexpr (in_segments) {
      select_.run(problem, beside.segments, stream);
    } else {
      select_.run(problem, nullptr, stream);
    }
    // What is settled stands before what was chosen behind it; the budget's counts have been read.
    return scores.settled ? put_settled_first(problem, kept_, counts, stream) : problem.chosen();
  }

 private:
  std::size_t counts_at() const { return padded(allot_.workspace_bytes()); }
  std::size_t most_at() const { return counts_at() + array_bytes<index_t>(std::size_t(rows_) * 2); }
  std::size_t weigh_at() const {
    return most_at() + (segment_scorer<scorer> ? array_bytes<unsigned>(std::size_t(rows_)) : 0);
  }
  std::size_t finished_at() const { return weigh_at() + padded(weigh_.workspace_bytes()); }
  std::size_t indices_at() const {
    return finished_at() +
           (changes_again ? array_bytes<float>(std::size_t(rows_) * std::size_t(capacity_)) : finish_.out_bytes());
  }

  index_t rows_, capacity_, kept_;
  finish finish_;
  allot<budget> allot_;
  weigh weigh_;
  select select_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
