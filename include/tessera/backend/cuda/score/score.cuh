// Scoring on the GPU: query rows score every stored key, without an attention matrix.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../core/model_shape.hpp"
#include "../device/check.cuh"
#include "../device/kernel.cuh"
#include "../device/tuning.cuh"
#include "../device/workspace.cuh"
#include "../store/slot_order.cuh"
#include "detail/score_lse.cuh"
#include "detail/score_sum.cuh"
#include "detail/wide_lse.cuh"
#include "detail/wide_sum.cuh"
#include "score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Scores every stored token by scorer.weigh(logit, lse) over the query rows and the heads of their group: by the sum,
/// or by the maximum. For a mean over rows the caller divides; to score by the newest query alone, the caller passes
/// only that query.
///
/// Call `workspace_bytes` once, then `run` any number of times. `run` neither allocates nor synchronises, and the host
/// needs no length, so a captured graph can be replayed while lengths grow. Results equal cpu::row_log_sum_exp and
/// cpu::accumulate_scores to rounding. Repeated calls give the same bits; for a scorer that observes every query, so do
/// chunks of queries. A logit that is NaN or +infinity is left out of its row's log-sum-exp and ranks its own token
/// last.
/// Shapes   as score_problem says; lengths at most `capacity`, n_q at most `queries`.
/// Errors   shapes that the kernels cannot take: tessera::error before anything is launched.
/// Cost     K is read twice, or once where the engine gives the rows' log-sum-exps. The first pass then covers only
///          heads that have a row without one, and is not launched if the caller says that all are given. 2 * rows *
///          tokens * k_dim multiply-adds each time on the tensor cores.
template <class View, attentive_scorer Scorer>
class attentive_score {
  using T = typename View::element_type;
  static_assert(sizeof(T) == 2, "tessera: the tensor-core scoring kernels take fp16 and bf16");
  static constexpr bool in_order = Scorer::observed == observes::every_query;
  static constexpr int stages = View::k_dim <= 192 ? 3 : 2;  // 256: the shared memory of sm_89 and sm_120 holds two
  using sums = detail::sum_kernel<View, Scorer>;
  using wide_lse = detail::wide_lse_kernel<View>;
  using wide_sum = detail::wide_sum_kernel<View, Scorer>;

 public:
  attentive_score(index_t sequences, index_t kv_heads, index_t q_heads, index_t queries, index_t capacity,
                  const device_info& device)
      : rows_(sequences * kv_heads), kv_heads_(kv_heads), q_heads_(q_heads), queries_(queries), capacity_(capacity) {
    require(sequences >= 1 && kv_heads >= 1, "sequences * kv_heads", rows_, "at least 1",
            "score a batch that has rows");
    require_head_counts(q_heads, kv_heads);
    require(queries >= 1 && capacity >= 1, "queries and capacity",
            std::to_string(queries) + " and " + std::to_string(capacity), "at least 1 each",
            "pass the most queries of a call and the most tokens of a row");
    query_rows_ = queries * (q_heads / kv_heads);
    require(offset_t(rows_) * query_rows_ <= offset_t(1) << 31, "query rows", offset_t(rows_) * query_rows_,
            "at most 2^31", "observe the prompt in smaller chunks");
    // For scorers of every query, the result must not depend on how the prompt was cut, so neither may the split nor
    // the kernel. Their calls have enough rows to fill the machine, and small splits would cost memory.
    split_ = in_order ? 2048 : 256;
    shape_.query_rows = query_rows_;
    shape_.capacity = capacity;
    wide_ = fits_wide(device);
    if (wide_)
      take_wide(device);
    else
      take_narrow(device);
  }

  std::size_t workspace_bytes() const { return memory(*this, nullptr).bytes(); }

  void run(const score_problem<View>& p, const Scorer& scorer, void* workspace, cudaStream_t stream) const {
    require(p.view.sequences >= 0 && p.view.sequences * kv_heads_ <= rows_ && p.view.kv_heads == kv_heads_ &&
                p.q.heads == q_heads_ && p.q.tokens >= 0 && p.q.tokens <= queries_ &&
                (p.q.tokens == 0 || p.q.sequences == p.view.sequences),
            "shape of a call",
            std::to_string(p.view.sequences) + " sequences, " + std::to_string(p.q.heads) + " q_heads, " +
                std::to_string(p.q.tokens) + " queries",
            "at most what this object was made for", "make one object for the largest batch");
    if (p.lse.data) require_same_shape("shape of lse", p.lse, p.q);
    require(!p.lse_complete || p.lse.data || p.q.tokens == 0, "lse", "null", "every row's, where lse_complete says so",
            "pass the log-sum-exps, or leave lse_complete out");
    require(p.q.data || p.q.tokens == 0 || p.view.sequences == 0, "memory of q", "null", "memory behind it",
            "pass the rows themselves");
    require(p.rule.scale >= 0, "scale", p.rule.scale, "at least 0", "pass 0 for 1 / sqrt(k_dim)");
    require_rows_on_16_bytes("K", p.view.k, p.view.k_strides);
    require_rows_on_16_bytes("q", p.q);
    watch_order(p.view, stream);
    const memory arrays(*this, workspace);
    // If a call has fewer queries than the workspace has room for, rows are laid out by the call's own count.
    const index_t query_rows = p.q.tokens * (q_heads_ / kv_heads_), rows = p.view.sequences * kv_heads_;
    const bool merges = query_rows > 0 && !p.lse_complete;
    if (merges) {
      const detail::lse_partials partials{arrays.partials, query_rows, slots(), split_, capacity_};
      lse_entry_.launch(
          {.blocks = dim3(unsigned(ceil_div(query_rows, lse_rows_held_)), unsigned(blocks_for(rows, lse_blocks_))),
           .threads = unsigned(lse_threads_),
           .shared_bytes = lse_shared_},
          stream, "launch of the log-sum-exp pass", p, partials);
      launch(detail::merge_lse_entry<View>,
             {.blocks = unsigned((offset_t(rows) * query_rows + 3) / 4), .threads = 128, .overlapping = overlaps_},
             stream, "launch of merge_lse", p, partials, arrays.lse);
    }
    detail::sum_shape shape = shape_;
    shape.lse = p.lse_complete ? nullptr : arrays.lse;
    shape.query_rows = query_rows;
    // The second pass begins early and may read keys: the launch that wrote them has ended before the merge lets it
    // begin.
    sum_entry_.launch({.blocks = unsigned(blocks_for(rows, sum_blocks_)),
                       .threads = unsigned(sum_threads_),
                       .shared_bytes = sum_shared_,
                       .overlapping = overlaps_ && merges},
                      stream, "launch of the score sums", p, scorer, shape);
  }

 private:
  /// Calls `call` with the first pass's kernel for this many query rows: 16, 64 or 128 per block.
  template <class Call>
  void with_lse_kernel(const Call& call) const {
    if constexpr (!in_order) {
      if (query_rows_ <= 16) return call(detail::lse_kernel<View, 1, 1, View::k_dim <= 128 ? 4 : stages>{});
      if constexpr (View::k_dim <= 128) {
        if (query_rows_ <= 64) return call(detail::lse_kernel<View, 4, 1, stages>{});
      }
    }
    call(detail::lse_kernel<View, 4, View::k_dim <= 128 ? 2 : 1, stages>{});
  }

  template <int RowWarps, int RowTiles, int Stages>
  void take_lse(detail::lse_kernel<View, RowWarps, RowTiles, Stages> kernel, const device_info& device) {
    lse_entry_ = detail::lse_entry<View, RowWarps, RowTiles, Stages>;
    lse_rows_held_ = kernel.rows_held;
    lse_shared_ = std::size_t(kernel.ring_bytes) + std::size_t(rows_) * sizeof(index_t);
    lse_blocks_ = resident(lse_entry_, lse_threads_, lse_shared_, device);
  }

  /// Which kernels score. Those with products of four warps are used if the code has them for this device and the query
  /// rows fit and fill more than a quarter of them. 64 rows of 8 heads, 131,072 tokens: 149 us against 210 (H200, CUDA
  /// 13.0). Slower: both passes in one launch, in which all blocks synchronise head by head and keep three quarters of
  /// the keys in shared memory. It reads K once, 281 MB, and takes 214 us: for each head, blocks wait 18 us for each
  /// other, for queries and for sums.
  static constexpr bool may_be_wide = !in_order && fits_wide_products<View::k_dim>;
  bool fits_wide(const device_info& device) const {
    if constexpr (!may_be_wide) {
      return false;
    } else {
      if (query_rows_ <= wide_lse::rows_held / 4 || query_rows_ > wide_lse::rows_held) return false;
      // Code for another architecture holds an empty kernel of fewer threads.
      const lse_kernel_type lse(detail::wide_lse_entry<View>);
      const sum_kernel_type sum(detail::wide_sum_entry<View, Scorer>);
      return lse.max_threads() >= wide_lse::threads && wide_lse::shared_bytes(rows_) <= lse.shared_limit(device) &&
             wide_sum::shared_bytes(rows_) <= sum.shared_limit(device);
    }
  }
  void take_wide(const device_info& device) {
    if constexpr (may_be_wide) {
      lse_entry_ = detail::wide_lse_entry<View>;
      sum_entry_ = detail::wide_sum_entry<View, Scorer>;
      lse_rows_held_ = wide_lse::rows_held;
      lse_threads_ = wide_lse::threads, sum_threads_ = wide_sum::threads;
      lse_shared_ = wide_lse::shared_bytes(rows_), sum_shared_ = wide_sum::shared_bytes(rows_);
      lse_blocks_ = resident(lse_entry_, lse_threads_, lse_shared_, device);
      sum_blocks_ = resident(sum_entry_, sum_threads_, sum_shared_, device);
      overlaps_ = sum_entry_.overlaps();
    }
  }
  /// How many blocks to launch. A block that continues with another row waits for that row's queries and keys, about as
  /// long as two units take. So if it costs no more, rows of equal length end with a block.
  int blocks_for(index_t rows, int most) const {
    if (!wide_ || rows < 1 || rows > most) return most;
    const int aligned = int(rows) * (most / int(rows));
    const index_t units = ceil_div(capacity_, index_t(wide_sum::tile));
    return ceil_div(units, index_t(most / rows)) <= ceil_div(units * rows, index_t(most)) + 2 ? aligned : most;
  }
  void take_narrow(const device_info& device) {
    with_lse_kernel([&](auto kernel) { take_lse(kernel, device); });
    sum_entry_ = detail::sum_entry<View, Scorer>;
    shape_ = sums::fitted(shape_, rows_, sum_entry_.shared_limit(device));
    sum_shared_ = sums::shared_bytes(shape_, rows_);
    sum_blocks_ = resident(sum_entry_, sums::threads, sum_shared_, device);
  }

  /// Blocks that the device runs at a time. It also raises the kernel's shared memory limit.
  template <class Kernel>
  static int resident(const Kernel& entry, int threads, std::size_t shared, const device_info& device) {
    entry.require_shared(shared, device, "scoring", "split the batch");
    return (std::min)(max_pieces, entry.resident_blocks(threads, shared, device));
  }

  index_t slots() const { return ceil_div(capacity_, split_); }
  struct memory : workspace_cut {
    const attentive_score& op;
    memory(const attentive_score& owner, void* begin) : workspace_cut(begin), op(owner) {}
    const std::size_t rows = std::size_t(op.rows_) * std::size_t(op.query_rows_);
    float2* partials = array<float2>(rows * std::size_t(op.slots()));
    float* lse = array<float>(rows);
  };

  index_t rows_, kv_heads_, q_heads_, queries_, capacity_, query_rows_ = 0, split_ = 256;
  using lse_kernel_type = device_kernel<score_problem<View>, detail::lse_partials>;
  using sum_kernel_type = device_kernel<score_problem<View>, Scorer, detail::sum_shape>;
  lse_kernel_type lse_entry_;
  sum_kernel_type sum_entry_;
  std::size_t lse_shared_ = 0, sum_shared_ = 0;
  index_t lse_rows_held_ = 1;
  bool wide_ = false;
  bool overlaps_ = false;  // the merge overlaps the first pass, and the second pass overlaps the merge
  int lse_threads_ = 128, sum_threads_ = sums::threads, lse_blocks_ = 1, sum_blocks_ = 1;
  detail::sum_shape shape_{};
};

namespace detail {

/// Used instead of an attentive_score where none is needed.
struct no_score {
  no_score(index_t, index_t, index_t, index_t, index_t, const device_info&) {}
  std::size_t workspace_bytes() const { return 0; }
};
template <class View, class Scorer, bool Needed>
struct score_where {
  using type = no_score;
};
template <class View, class Scorer>
struct score_where<View, Scorer, true> {
  using type = attentive_score<View, Scorer>;
};

}  // namespace detail

/// attentive_score if it is needed: other scorers have no `weigh`.
template <class View, class Scorer, bool Needed>
using attentive_score_where = typename detail::score_where<View, Scorer, Needed>::type;

// Sums over a window's query rows become their mean, on the GPU.

namespace detail {

template <class View, int Threads>
__global__ void __launch_bounds__(Threads) divide_rows_entry(const __grid_constant__ score_problem<View> p) {
  const index_t row = blockIdx.y, b = row / p.view.kv_heads, h = row % p.view.kv_heads;
  const index_t tokens = p.view.length(b, h), asked = p.valid_queries(b);
  if (asked == 0) return;
  float* scores = p.score_row(row);
  const float rows = float(asked * (p.q.heads / p.view.kv_heads));
  for (index_t i = index_t(blockIdx.x * Threads + threadIdx.x); i < tokens; i += index_t(gridDim.x) * Threads)
    scores[i] /= rows;
}

}  // namespace detail

/// Divides the scores of a call by the number of query rows that were added up: those of a token's group, for every
/// query that counts. `capacity`: an upper bound of a row's tokens.
/// Cost     one read and write of the scores.
template <class View>
void divide_rows(const score_problem<View>& problem, index_t capacity, cudaStream_t stream) {
  const dim3 grid{unsigned(std::clamp(ceil_div(capacity, 2048), 1, 64)),
                  unsigned(problem.view.sequences * problem.view.kv_heads)};
  detail::divide_rows_entry<View, 256><<<grid, 256, 0, stream>>>(problem);
  check(cudaGetLastError(), "launch of divide_rows");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
