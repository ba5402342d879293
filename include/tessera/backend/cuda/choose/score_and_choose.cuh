// What a batch keeps of one layer, on the device: scores by the policy's scorer, counts by its budget, slots by its
// selector.
#pragma once

#include <algorithm>
#include <string>

#include "../../../core/engine/choose_problem.hpp"
#include "../score/expected/score_expected.cuh"
#include "../score/score.cuh"
#include "../score/score_rows.cuh"
#include "../score/stored_scores.cuh"
#include "retain.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Upper bounds of later problems. Workspaces are made for them.
struct choose_limits {
  index_t sequences = 1, kv_heads = 1, q_heads = 1;
  index_t queries = 1;   ///< per call, where the scorer observes a window
  index_t capacity = 1;  ///< tokens that a (sequence, kv_head) stores
  index_t retained = 0;  ///< tokens that it keeps at most (`max_retained`); 0: the capacity
};

/// An upper bound of the tokens that one kv_head keeps of `capacity`, in any of `layers`, whatever the scores.
/// `longest_tail`: an upper bound of the newest tokens that stay whatever their score.
template <class Policy>
index_t max_retained(const Policy& policy, index_t layers, index_t kv_heads, index_t capacity, index_t longest_tail) {
  index_t largest = (std::min)(capacity, policy.budget.tokens);
  for (index_t layer = 0; layer < layers; ++layer) {
    // A turn with few queries has a short tail. With a short tail some layers keep more.
    for (const index_t tail : {0, longest_tail}) {
      largest = (std::max)(largest, bound_kept(policy.budget, {layer, layers, kv_heads, tail, capacity}).longest);
    }
  }
  return largest;
}

/// Chooses what every (sequence, kv_head) of a batch keeps of one layer: the device's cpu::score_and_choose. The
/// caches' first stages call it. It is made from a policy and from limits. A later policy may have another budget
/// within these limits.
///
/// No allocation, no synchronisation, no length on the host: a recorded run can be replayed while lengths change.
/// Returns  row r = sequence * kv_heads + head begins at r * limits.retained in the workspace. It is valid until the
///          next run.
/// Errors   an input of the scorer is missing, or the problem exceeds the limits: tessera::error before anything is
///          launched. A later call reports positions that do not ascend (watch_order). Not checked, because the host
///          does not know them: heads of different lengths that keep the same slots.
/// Cost     scoring, by kind of scorer: of a window, see attentive_score; by contents, see score_contents and
///          score_lagged; by statistics, see score_expected. Then pooling, budget and selection: see choose_kept, with
///          one row per sequence where its heads choose together.
template <class View, class Policy>
class score_and_choose {
  static_assert(check_chooses<Policy>());
  static_assert(check_device_rows<View>());
  using T = typename View::element_type;
  using scorer = typename Policy::scorer_type;
  using scope = typename Policy::scope_type;
  static constexpr observes observed = scorer::observed;
  static constexpr bool joins = joining_scope<scope>, beside_tokens = lies_beside_tokens(observed);
  static_assert(check_runs_on_devices<Policy>());

  using score_type = attentive_score_where<View, scorer, observed == observes::window>;
  using stored_type = typename detail::stored_score<View, scorer>::type;
  using weight_type = typename detail::weight_score<View, scorer>::type;
  using factor_type = typename detail::factor_score<View, scorer>::type;
  using expected_type = typename detail::expected_score<View, scorer>::type;

 public:
  using problem_type = choose_problem<View, T>;

  score_and_choose(const Policy& policy, const choose_limits& limits, const device_info& device)
      : limits_(limits),
        max_retained_(limits.retained > 0 ? (std::min)(limits.retained, limits.capacity) : limits.capacity),
        score_(limits.sequences, limits.kv_heads, limits.q_heads, limits.queries, limits.capacity, device),
        stored_(limits.sequences * limits.kv_heads, limits.capacity),
        expected_(limits.sequences, limits.kv_heads, limits.q_heads, limits.capacity, device),
        weight_(limits.sequences * limits.kv_heads, limits.capacity),
        factor_(limits.sequences * limits.kv_heads, limits.capacity),
        choose_(policy, limits.sequences, joins ? 1 : limits.kv_heads, limits.capacity, max_retained_, device) {}

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// Scores a layer without choosing, whatever the budget, for model_scores: before heads are joined, and before the
  /// scorer's last pass (pooling), which a choice makes.
  /// Returns  the scores of every kv_head, valid until the next run.
  /// Errors   a reach or counts; those of `run`: tessera::error.
  score_rows score(const Policy& policy, const problem_type& p, void* workspace, cudaStream_t stream) const {
    require(!p.reach && !p.counts && p.granularity <= 1, "reach, counts or granularity of the problem", "given", "none",
            "one set for a model is chosen from all tokens, by the policy's budget");
    check_problem(policy, p);
    return score_batch(policy, p, memory(*this, workspace), stream);
  }

  selection_view run(const Policy& policy, const problem_type& p, void* workspace, cudaStream_t stream) const {
    check_problem(policy, p);
    check_budget(policy, p);
    const memory arrays(*this, workspace);
    const score_rows in = score_batch(policy, p, arrays, stream);
    slot_facts beside;
    beside.counts = p.counts;
    beside.granularity = p.granularity;
    beside.segments = {p.segments, p.view.kv_heads, joins ? 1 : p.view.kv_heads};
    if constexpr (weighted_scorer<scorer>) {
      weight_.run(p.view, p.first_position, policy.scorer.weight, arrays.weights, limits_.capacity, nullptr, stream);
      beside.weights = arrays.weights;
      beside.weight_stride = limits_.capacity;
    }
    if constexpr (!joins) {
      return choose_.run(policy, in, p.layer, p.layers, arrays.choosing, stream, beside);
    } else {
      constexpr row_join by = joins_rows_by<scorer>;
      constexpr bool adds_up = observed != observes::nothing && observed != observes::statistics &&
                               (by == row_join::sum || by == row_join::newest);
      const index_t summed = adds_up && p.q.heads > 0 ? p.q.heads : p.view.kv_heads;
      const score_rows joined = join_heads(in, policy.scope, summed, limits_.capacity, arrays.joined, stream);
      const selection_view one = choose_.run(policy, joined, p.layer, p.layers, arrays.choosing, stream, beside);
      return give_to_heads(one, p.view.sequences, p.view.kv_heads, arrays.slots, max_retained_, arrays.counts, stream);
    }
  }

 private:
  static index_t tail_of(const Policy& policy, const problem_type& p) {
    if (observed == observes::window) return (std::max)(p.tail, p.q.tokens);
    return (std::max)(p.tail, policy.scorer.protected_tail(policy.budget.tokens));
  }

  void check_problem(const Policy& policy, const problem_type& p) const {
    require(p.view.sequences >= 1 && p.view.sequences <= limits_.sequences && p.view.kv_heads == limits_.kv_heads,
            "sequences and kv_heads", std::to_string(p.view.sequences) + " and " + std::to_string(p.view.kv_heads),
            "1 to " + std::to_string(limits_.sequences) + " and " + std::to_string(limits_.kv_heads),
            "construct score_and_choose for the largest batch");
    constexpr bool by_statistics = observed == observes::statistics;
    p.check(!beside_tokens && (observed == observes::window || by_statistics || positional_scorer<scorer>),
            by_statistics);
    if constexpr (beside_tokens) {
      require(p.scores.data != nullptr, "scores", "null", "one for every stored slot",
              "accumulate them beside the tokens");
      require(
          p.scores.begin || p.view.kv_heads == 1 || p.scores.sequence_stride == p.scores.head_stride * p.view.kv_heads,
          "sequence stride of the scores", p.scores.sequence_stride,
          "kv_heads rows, " + std::to_string(p.scores.head_stride * p.view.kv_heads),
          "keep them as [sequences, kv_heads, slots], or pass where each row begins");
    }
    if constexpr (observed == observes::window) require_queries(p);
    require(!by_statistics || p.q.heads == limits_.q_heads, "query heads of the statistics", p.q.heads,
            std::to_string(limits_.q_heads), "set q.heads");
    require(!Policy::needs_segments || p.segments.data, "segments", "null",
            "which segment of the text every stored slot belongs to", "keep them beside the tokens: cuda::append");
    require(!p.reach || length_budget<typename Policy::budget_type>, "reach", "given",
            "null: heads compete for this budget with all that they hold", "take a budget by lengths, as calibrated");
    require(!weighted_scorer<scorer> || !p.projection, "projection", "given",
            "null: the device weighs values as they are", "leave it out, or choose on the CPU");
    if constexpr (observed == observes::window) {
      require(!p.valid || p.tails || p.tail == 0, "tail", p.tail, "0 where valid is given", "pass tails by sequence");
    } else {
      // The host cannot know what the scorer protects of each sequence's own budget.
      require(!p.budgets || p.tails || policy.scorer.protected_tail(1) == policy.scorer.protected_tail(1 << 20),
              "tails", "null", "newest tokens by sequence, where budgets are given",
              "pass what the scorer protects of each budget");
    }
  }

  void check_budget(const Policy& policy, const problem_type& p) const {
    // Pages that are left over may give a head up to a page more than its budget, or all that heads have.
    require(p.granularity == 1 || max_retained_ >= limits_.capacity, "choose_limits::retained", max_retained_,
            "0, or the capacity, where counts are whole pages", "make the operation for all that is stored");
    if (!p.budgets && !p.tails) {
      const layer_extent extent{p.layer, p.layers, joins ? 1 : p.view.kv_heads, tail_of(policy, p), limits_.capacity};
      const index_t largest =
          (std::max)(bound_kept(policy.budget, extent).longest, (std::min)(extent.protected_tail, extent.longest));
      require(largest <= max_retained_, "tokens that a kv_head may keep", largest,
              "at most " + std::to_string(max_retained_), "raise choose_limits::retained: see max_retained");
    }
  }

  struct memory : workspace_cut {
    const score_and_choose& op;
    memory(const score_and_choose& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t sequences = std::size_t(op.limits_.sequences),
                      rows = sequences * std::size_t(op.limits_.kv_heads);
    const std::size_t capacity = std::size_t(op.limits_.capacity), all = rows * capacity;
    float* raw = array<float>(beside_tokens ? 0 : all);
    float* weights = array<float>(weighted_scorer<scorer> ? all : 0);
    float* factors = array<float>(multiplied_scorer<scorer> ? all : 0);
    float* joined = array<float>(joins ? sequences * capacity : 0);  // one row for all heads
    index_t* slots = array<index_t>(joins ? rows * std::size_t(op.max_retained_) : 0);
    index_t* counts = array<index_t>(joins ? rows : 0);
    index_t* settled = array<index_t>(rows);
    index_t* earlier = array<index_t>(rows);
    void* scoring = block((std::max)({op.score_.workspace_bytes(), op.stored_.workspace_bytes(),
                                      op.expected_.workspace_bytes(), op.factor_.workspace_bytes()}));
    void* choosing = block(op.choose_.workspace_bytes());
  };

  score_rows score_batch(const Policy& policy, const problem_type& p, const memory& arrays, cudaStream_t stream) const {
    watch_order(p.view, stream);
    score_rows in;
    in.sequences = p.view.sequences;
    in.kv_heads = p.view.kv_heads;
    in.lengths = p.view.lengths;
    in.length_strides = {p.view.length_strides.sequence, p.view.length_strides.head};
    in.tail = tail_of(policy, p);
    in.tails = p.tails ? p.tails : (observed == observes::window ? p.valid : nullptr);
    in.budgets = p.budgets;
    if (p.reach) {
      in.settled = arrays.settled, in.earlier = arrays.earlier, in.reach = p.reach;
      find_settled(p.view, joins ? 1 : p.view.kv_heads, p.reach, arrays.settled, arrays.earlier, stream);
    }
    if constexpr (beside_tokens) {
      in.scores = p.scores.data;
      in.offsets = p.scores.begin;
      in.row_stride = p.view.kv_heads > 1 ? p.scores.head_stride : p.scores.sequence_stride;
    } else {
      in.scores = arrays.raw;
      in.row_stride = limits_.capacity;
      if constexpr (observed == observes::nothing) {
        stored_.run(p.view, p.first_position, policy.scorer, arrays.raw, limits_.capacity, arrays.scoring, stream);
      } else if constexpr (observed == observes::statistics) {
        expected_.run(p.view, policy.scorer, p.statistics, p.rope_frequencies, p.first_position, p.rule, arrays.raw,
                      limits_.capacity, arrays.scoring, stream);
      } else {
        score_problem<View> problem;
        problem.view = p.view;
        problem.view.order = slot_order::ascending;  // watch_order has been called above
        problem.q = p.q;
        problem.first_position = p.first_position;
        problem.valid = p.valid;
        problem.rule = p.rule;
        problem.lse = p.lse;
        problem.lse_complete = p.lse_complete;
        problem.scores = arrays.raw;
        problem.row_stride = limits_.capacity;
        score_.run(problem, policy.scorer, arrays.scoring, stream);
        if constexpr (joins_rows_by<scorer> == row_join::mean) divide_rows(problem, limits_.capacity, stream);
      }
    }
    if constexpr (multiplied_scorer<scorer>) {
      factor_.run(p.view, p.first_position, policy.scorer.factor, arrays.factors, limits_.capacity, arrays.scoring,
                  stream);
      multiply_scores(p.view, policy.scorer, arrays.factors, arrays.raw, limits_.capacity, stream);
    }
    return in;
  }

  choose_limits limits_;
  index_t max_retained_;
  score_type score_;
  stored_type stored_;
  expected_type expected_;
  weight_type weight_;
  factor_type factor_;
  choose_kept<Policy> choose_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
