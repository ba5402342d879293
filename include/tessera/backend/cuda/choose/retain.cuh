// The scorer's last pass, the budget and the selection over a batch, on the device: what every kv_head keeps.
#pragma once

#include <algorithm>

#include "../../../concepts/scope.hpp"
#include "../../../concepts/scorer.hpp"
#include "../../../core/plan/whole_pages.hpp"
#include "../../../core/selection.hpp"
#include "../../../recipe.hpp"
#include "../../../selector/top_tokens.hpp"
#include "../score/pool.cuh"
#include "allot.cuh"
#include "detail/segments.cuh"
#include "top_k.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// One set of slots for all heads of a layer, on the GPU: the heads' scores are joined to one row, and all heads get its
// slots.

namespace detail {

/// One thread handles one slot; blockIdx.y is the sequence. Heads are joined in order, as on the host.
template <class Scope, int Threads>
__global__ void __launch_bounds__(Threads)
    join_heads_entry(const __grid_constant__ score_rows in, const __grid_constant__ finished_rows out, Scope scope,
                     index_t summed) {
  const index_t b = blockIdx.y, tokens = (min)(in.tokens(b, 0), out.capacity);
  float* to = out.row(b);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads) {
    float joined = in.scores[in.begin(b * in.kv_heads) + i];
    for (index_t h = 1; h < in.kv_heads; ++h) {
      joined = scope.join(joined, in.scores[in.begin(b * in.kv_heads + h) + i]);
    }
    to[i] = scope.joined(joined, summed);
  }
}

/// Copies the slots of row b to rows b * kv_heads + h.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    give_to_heads_entry(selection_view of_layer, index_t kv_heads, index_t* slots, offset_t stride, index_t* counts) {
  const index_t row = blockIdx.y, b = row / kv_heads, count = of_layer.count(b);
  const index_t* from = of_layer.row(b);
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < count; i += index_t(gridDim.x) * Threads)
    slots[row * stride + i] = from[i];
  if (blockIdx.x == 0 && threadIdx.x == 0) counts[row] = count;
}

}  // namespace detail

/// Joins the scores of all heads of each sequence to one row. The heads must store equally many slots. The bits equal
/// the CPU's where neither compiler fuses the scope's arithmetic.
/// Shapes   out [sequences, capacity].   Returns  that row, with lengths and tails of the sequence.   Cost  one read.
template <joining_scope Scope>
score_rows join_heads(const score_rows& in, const Scope& scope, index_t summed, index_t capacity, float* out,
                      cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(capacity, 1024), 1, 512)), unsigned(in.sequences)};
  detail::join_heads_entry<Scope, 256>
      <<<grid, 256, 0, stream>>>(in, detail::finished_rows{out, capacity}, scope, summed);
  check(cudaGetLastError(), "launch of join_heads");
  score_rows joined = in;
  joined.scores = out;
  joined.offsets = nullptr;
  joined.row_stride = capacity;
  joined.kv_heads = 1;
  return joined;
}

/// Gives every head of a sequence the slots of the sequence's one row.
/// Shapes   slots [sequences * kv_heads, stride], counts [sequences * kv_heads].   Returns  the selection of all heads.
inline selection_view give_to_heads(const selection_view& of_layer, index_t sequences, index_t kv_heads, index_t* slots,
                                    index_t stride, index_t* counts, cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(stride, 1024), 1, 64)), unsigned(sequences * kv_heads)};
  detail::give_to_heads_entry<256><<<grid, 256, 0, stream>>>(of_layer, kv_heads, slots, stride, counts);
  check(cudaGetLastError(), "launch of give_to_heads");
  return {slots, counts, nullptr, stride};
}

// Weighs scores by values, on the GPU, once it is known how many tokens a head keeps.

namespace detail {

/// Counts the candidates of a row, and how many of them are chosen by scores alone. One thread handles one row.
template <class Scorer>
__global__ void __launch_bounds__(128)
    count_first_entry(const __grid_constant__ score_rows in, Scorer scorer, const index_t* max_retained,
                      index_t* candidates, index_t* first) {
  const index_t row = index_t(blockIdx.x * 128 + threadIdx.x);
  if (row >= in.sequences * in.kv_heads) return;
  const index_t b = row / in.kv_heads, n = in.candidates(b, row % in.kv_heads), stay = (min)(in.settled_of(row), n);
  candidates[row] = n;
  first[row] = stay + (min)((max)(scorer.taken_first(max_retained[row] - stay) - in.protected_tail(b), 0), n - stay);
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

/// Ranks the slots that are chosen first before all other slots.
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
/// Workspace  `max_retained` slots and three numbers a row.   Cost  one selection, one pass over scores and weights.
template <weighted_scorer Scorer>
class weigh_scores {
 public:
  weigh_scores(index_t rows, index_t capacity, index_t max_retained, const device_info& device)
      : rows_(rows),
        capacity_(capacity),
        max_retained_(max_retained),
        best_({}, rows, capacity, device, max_retained) {}

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// counts: how many each row keeps, tail and settled slots included; weights [rows, weight_stride]; out [rows,
  /// capacity], or the rows of `in`.
  void run(const score_rows& in, const Scorer& scorer, const index_t* counts, const float* weights,
           offset_t weight_stride, float* out, void* workspace, cudaStream_t stream) const {
    const memory arrays(*this, workspace);
    const index_t rows = in.sequences * in.kv_heads;
    detail::count_first_entry<Scorer>
        <<<unsigned(ceil_div(rows, 128)), 128, 0, stream>>>(in, scorer, counts, arrays.candidates, arrays.first);
    select_problem problem;
    problem.scores = in.scores;
    problem.score_stride = in.row_stride;
    problem.score_offsets = in.offsets;
    problem.n = {arrays.candidates};
    problem.keep = {arrays.first};
    problem.skip = in.settled;
    problem.out = arrays.slots;
    problem.out_stride = max_retained_;
    problem.counts = arrays.chosen;
    problem.rows = rows;
    best_.run(problem, nullptr, stream);
    const detail::finished_rows to{out, capacity_};
    const dim3 grid{unsigned(std::clamp(ceil_div(capacity_, 1024), 1, 256)), unsigned(rows)};
    detail::weigh_entry<Scorer, 256><<<grid, 256, 0, stream>>>(in, to, scorer, weights, weight_stride);
    detail::rank_first_entry<256><<<dim3(8, unsigned(rows)), 256, 0, stream>>>(problem, to);
    check(cudaGetLastError(), "launch of weigh_scores");
  }

 private:
  struct memory : workspace_cut {
    const weigh_scores& op;
    memory(const weigh_scores& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_);
    index_t* candidates = array<index_t>(rows);
    index_t* first = array<index_t>(rows);
    index_t* chosen = array<index_t>(rows);
    index_t* slots = array<index_t>(rows * std::size_t(op.max_retained_));
  };

  index_t rows_, capacity_, max_retained_;
  select_slots<top_tokens> best_;
};

/// What scorers and selectors may read of a batch's slots beside their scores, on the device.
struct slot_facts {
  segment_rows segments{};
  const float* weights = nullptr;   ///< [rows, weight_stride]
  const index_t* counts = nullptr;  ///< [rows], how many each row keeps, instead of the budget's
  offset_t weight_stride = 0;
  index_t granularity = 1;  ///< counts become whole pages of so many slots
};

namespace detail {

/// Whole pages of what heads keep. One thread handles one sequence.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_pages_entry(const __grid_constant__ score_rows in, index_t page, index_t* counts) {
  const index_t sequence = index_t(blockIdx.x * Threads + threadIdx.x);
  if (sequence >= in.sequences) return;
  const index_t row = sequence * in.kv_heads;
  const stored_heads stored{in.lengths + sequence * in.length_strides.sequence, in.length_strides.head,
                            in.settled ? in.settled + row : nullptr, in.protected_tail(sequence)};
  count_whole_pages(in.kv_heads, page, stored, counts + row);
}

/// Turns chosen slots, which count from the first competing slot, into slots of the head. Writes the settled slots
/// before them.
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

/// Used instead of weigh_scores where nothing is weighed.
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

/// Puts the slots that a selection skipped before the chosen ones.
/// Shapes   counts [rows], not those of the problem; `max_retained`: an upper bound of a row's slots.
/// Returns  the selection of all that stays.   Cost  one launch.
inline selection_view put_settled_first(const select_problem& problem, index_t max_retained, index_t* counts,
                                        cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(max_retained, 1024), 1, 64)), unsigned(problem.rows)};
  detail::put_settled_first_entry<256><<<grid, 256, 0, stream>>>(problem, counts);
  check(cudaGetLastError(), "launch of put_settled_first");
  return {problem.out, counts, problem.out_offsets, problem.out_stride};
}

/// Chooses what every (sequence, kv_head) of a batch keeps: the device's cpu::choose_kept, with its results.
///
/// No allocation, no synchronisation, no length on the host.
/// Errors   invalid shapes and parameters: tessera::error before anything is launched.
/// Settled slots stay: budgets count them, and selectors see only the slots behind them.
/// Cost     pooling: one launch where the scorer pools over more than one token, two where it sees segments. Budget:
///          one to four launches. Selection: one launch, one more in segments, and one more where slots are settled.
///          Weights: see weigh_scores.
template <class Retain>
class choose_kept {
  using scorer = typename Retain::scorer_type;
  using budget = typename Retain::budget_type;
  using finish = finish_scores<scorer>;
  using weigh = typename detail::weights_of<scorer>::type;
  using select = typename detail::selection_of<typename Retain::selector_type>::type;
  static constexpr bool in_segments = segment_selector<typename Retain::selector_type>;
  /// Whether scores change after the scorer's last pass. If so, rows are needed even where the scorer has none.
  static constexpr bool changes_again = segment_scorer<scorer> || weighted_scorer<scorer>;

 public:
  /// `max_retained`: an upper bound of the tokens that a head keeps.
  choose_kept(const Retain& policy, index_t sequences, index_t kv_heads, index_t capacity, index_t max_retained,
              const device_info& device)
      : rows_(sequences * kv_heads),
        capacity_(capacity),
        max_retained_(max_retained),
        finish_(sequences, kv_heads, capacity, device),
        allot_(sequences, kv_heads, capacity, device, policy.budget),
        weigh_(rows_, capacity, max_retained, device),
        select_(policy.selector, rows_, capacity, device, (std::min)(max_retained, policy.budget.tokens)) {}

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  /// Row r of the result begins at r * max_retained; it lies in the workspace. `in` may have fewer sequences than this
  /// object was made for. Where the sequences' plans differ, `in.budgets` and `in.tails` give their numbers by
  /// sequence.
  selection_view run(const Retain& policy, const score_rows& in, index_t layer, index_t layers, void* workspace,
                     cudaStream_t stream, const slot_facts& beside = {}) const {
    const memory arrays(*this, workspace);
    float* const finished = arrays.finished;
    // Budgets and selectors accept NaN. A pass that changes scores further needs scores without NaN.
    const bool as_they_are = !changes_again && finish::leaves_scores(policy.scorer);
    score_rows scores = as_they_are ? in : finish_.run(in, policy.scorer, finished, stream);
    const auto changed = [&] {
      scores.scores = finished;
      scores.offsets = nullptr;
      scores.row_stride = capacity_;
    };
    if constexpr (segment_scorer<scorer>) {
      rescore_segments(scores, beside.segments, policy.scorer, capacity_, finished, arrays.largest, stream);
      changed();
    }
    index_t* const counts = arrays.counts;
    if (beside.counts) {
      check(cudaMemcpyAsync(counts, beside.counts, std::size_t(scores.sequences * scores.kv_heads) * sizeof(index_t),
                            cudaMemcpyDeviceToDevice, stream),
            "cudaMemcpyAsync");
    } else {
      allot_.run(scores, policy.budget, layer, layers, counts, arrays.allotting, stream);
    }
    if (beside.granularity > 1) {
      detail::count_pages_entry<32>
          <<<unsigned(ceil_div(scores.sequences, 32)), 32, 0, stream>>>(scores, beside.granularity, counts);
      check(cudaGetLastError(), "launch of count_pages");
    }
    if constexpr (weighted_scorer<scorer>) {
      weigh_.run(scores, policy.scorer, counts, beside.weights, beside.weight_stride, finished, arrays.weighing,
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
    problem.out = arrays.slots;
    problem.out_stride = max_retained_;
    problem.counts = arrays.chosen;
    problem.rows = scores.sequences * scores.kv_heads;
    // Lengths of separate rows lie side by side; a row for a whole sequence has the length of its first head.
    problem.n.stride = index_t(scores.kv_heads > 1 ? 1 : (std::max<offset_t>)(1, scores.length_strides.sequence));
    if constexpr (in_segments) {
      select_.run(problem, beside.segments, stream);
    } else {
      select_.run(problem, nullptr, stream);
    }
    // Settled slots come before the chosen ones. The budget's counts have been read.
    return scores.settled ? put_settled_first(problem, max_retained_, counts, stream) : problem.chosen();
  }

 private:
  struct memory : workspace_cut {
    const choose_kept& op;
    memory(const choose_kept& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_), all = rows * std::size_t(op.capacity_);
    void* allotting = block(op.allot_.workspace_bytes());
    index_t* counts = array<index_t>(rows);
    index_t* chosen = array<index_t>(rows);
    unsigned* largest = array<unsigned>(segment_scorer<scorer> ? rows : 0);
    void* weighing = block(op.weigh_.workspace_bytes());
    float* finished = array<float>(changes_again || finish::changes ? all : 0);
    index_t* slots = array<index_t>(rows * std::size_t(op.max_retained_));
  };

  index_t rows_, capacity_, max_retained_;
  finish finish_;
  allot<budget> allot_;
  weigh weigh_;
  select select_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
