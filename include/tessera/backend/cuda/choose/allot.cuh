// Budgets on the GPU: how many tokens every kv_head keeps, without a round trip to the host.
#pragma once

#include <algorithm>
#include <concepts>

#include "../../../concepts/budget.hpp"
#include "../../../core/error.hpp"
#include "../../../core/plan/share_table.hpp"
#include "../device/kernel.cuh"
#include "../device/memory.cuh"
#include "../device/tuning.cuh"
#include "../device/warp.cuh"
#include "../device/workspace.cuh"
#include "../score/score_rows.cuh"
#include "detail/row_keys.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int allot_threads = 512;
inline constexpr int allot_levels = 3;          // 11, 11 and 10 bits of the ordered score
inline constexpr int allot_bins = 2048;         // per level; the last level uses half of them
inline constexpr index_t allot_portion = 8192;  // fewest scores that are worth a block of their own

/// How many tokens a head keeps: its share, but at least its tail and at most what it stores.
__device__ inline index_t kept_of(index_t share, index_t tail, index_t tokens) {
  return (min)((max)(share, (min)(tail, tokens)), tokens);
}

/// The budget of one sequence: the policy, with the sequence's own tokens where there are any.
template <class Budget>
__device__ Budget budget_of(Budget policy, const score_rows& in, index_t sequence) {
  if (in.budgets) policy.tokens = in.budgets[sequence];
  return policy;
}

/// A layer, and how many layers there are.
struct layer_of {
  index_t layer, layers;
};

template <class Budget>
__device__ bool all_fit(const score_rows& in, index_t sequence, const Budget& policy, const layer_of& asked) {
  return keeps_all(
      policy, layer_extent{asked.layer, asked.layers, in.kv_heads, in.protected_tail(sequence), in.longest(sequence)});
}

/// Shares that depend on lengths alone. One thread handles one row.
template <class Budget>
__global__ void __launch_bounds__(128)
    allot_by_length_entry(const __grid_constant__ score_rows in, Budget of_all, layer_of asked, index_t* counts) {
  wait_for_earlier();
  let_later_begin();
  const index_t row = index_t(blockIdx.x * 128 + threadIdx.x);
  if (row >= in.sequences * in.kv_heads) return;
  const index_t sequence = row / in.kv_heads, head = row % in.kv_heads, tail = in.protected_tail(sequence);
  const index_t tokens = in.tokens(sequence, head);
  const Budget policy = budget_of(of_all, in, sequence);
  head_extent extent{asked.layer, asked.layers, head, in.kv_heads, tail, tokens};
  if (in.settled) {
    extent.earlier = in.earlier[row];
    extent.dropped = in.reach[sequence].prompt_tokens() - (tokens - extent.earlier);
  }
  counts[row] =
      all_fit(in, sequence, policy, asked) ? tokens : kept_of(policy.share(extent), in.settled_of(row) + tail, tokens);
}

/// Progress of one sequence's selection over all of its heads.
struct allot_state {
  unsigned prefix;     // leading bits of the lowest winning score
  unsigned remaining;  // winners left among scores with that prefix
  unsigned arrived;    // blocks of this level that are done
  unsigned settled;    // 1: nothing to select, because all or none win
};

struct allot_scratch {
  unsigned* bins;      // [levels, rows, allot_bins]
  allot_state* state;  // [sequences]
  unsigned* won;       // [rows], certain winners
};

/// One level of the selection of the best kv_heads * base candidates of a sequence. Every block counts its scores by
/// the level's bits. The block that finishes last finds the bits of the lowest winner. Histograms are per head, so the
/// last level gives the winners of each head without another pass.
template <class Budget, int Level>
__global__ void __launch_bounds__(allot_threads)
    allot_by_score_entry(const __grid_constant__ score_rows in, Budget of_all, layer_of asked, allot_scratch scratch,
                         index_t capacity, index_t* counts) {
  constexpr key_digit digit = key_digit::of_pass(Level);
  constexpr int width = 1 << digit.bits();
  __shared__ unsigned bins[allot_bins], chosen, left;
  __shared__ block_scan<allot_threads, unsigned> scan;
  __shared__ bool last;
  const index_t row = blockIdx.y, sequence = row / in.kv_heads, heads = in.kv_heads;
  const index_t rows = in.sequences * heads, first_row = sequence * heads;
  allot_state& state = scratch.state[sequence];
  if (Level > 0 && state.settled) return;

  for (int i = threadIdx.x; i < width; i += allot_threads) bins[i] = 0;
  __syncthreads();
  const index_t candidates = (min)(in.candidates(sequence, row % heads), capacity);
  const float* scores = in.scores + in.begin(row);
  const unsigned prefix = Level > 0 ? state.prefix : 0;
#pragma unroll 4
  for (index_t i = index_t(blockIdx.x * allot_threads + threadIdx.x); i < candidates;
       i += index_t(gridDim.x) * allot_threads) {
    const unsigned key = ordered_bits(scores[i]);
    if (digit.shares(key, prefix)) atomicAdd(&bins[digit(key)], 1u);
  }
  __syncthreads();
  unsigned* all_bins = scratch.bins + offset_t(Level) * rows * allot_bins;
  for (int i = threadIdx.x; i < width; i += allot_threads) {
    if (bins[i]) atomicAdd(&all_bins[offset_t(row) * allot_bins + i], bins[i]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&state.arrived, 1u) == gridDim.x * unsigned(heads) - 1;
    if (last) state.arrived = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();

  const Budget policy = budget_of(of_all, in, sequence);
  const index_t tail = in.protected_tail(sequence), base = (max)(0, policy.tokens - tail);
  unsigned remaining;
  if (Level == 0) {
    index_t longest = 0;
    offset_t all = 0;
    for (index_t h = 0; h < heads; ++h) {
      const index_t of_head = in.candidates(sequence, h);
      longest = (max)(longest, of_head);
      all += of_head;
    }
    const offset_t places = (min)(all, offset_t(heads) * base);
    const bool fits = base >= longest || all_fit(in, sequence, policy, asked);
    if (fits || places == 0 || places == all) {
      for (index_t h = threadIdx.x; h < heads; h += allot_threads) {
        const index_t tokens = in.tokens(sequence, h);
        const index_t won = places == 0 ? 0 : in.candidates(sequence, h);
        counts[first_row + h] = fits ? tokens : kept_of(policy.share_won(won, base, tail), tail, tokens);
      }
      if (threadIdx.x == 0) state.settled = 1;
      return;
    }
    remaining = unsigned(places);
  } else {
    remaining = state.remaining;
  }

  // From the top: thread t has `each` neighbouring bins, the highest bins first.
  constexpr int each = width / allot_threads;
  unsigned mine = 0, of_bin[each];
#pragma unroll
  for (int j = 0; j < each; ++j) {
    const int bin = width - 1 - (int(threadIdx.x) * each + j);
    of_bin[j] = 0;
    for (index_t h = 0; h < heads; ++h) of_bin[j] += __ldcg(&all_bins[offset_t(first_row + h) * allot_bins + bin]);
    mine += of_bin[j];
  }
  unsigned above = scan.exclusive_sum(mine);
#pragma unroll
  for (int j = 0; j < each; ++j) {
    if (above < remaining && remaining <= above + of_bin[j]) {
      chosen = unsigned(width - 1 - (int(threadIdx.x) * each + j));
      left = remaining - above;
    }
    above += of_bin[j];
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (index_t h = warp; h < heads; h += allot_threads / 32) {
    unsigned higher = 0;
    for (int bin = int(chosen) + 1 + lane; bin < width; bin += 32)
      higher += __ldcg(&all_bins[offset_t(first_row + h) * allot_bins + bin]);
    higher = warp_sum(higher);
    if (lane == 0) scratch.won[first_row + h] = higher + (Level > 0 ? scratch.won[first_row + h] : 0);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    state.prefix = Level == 0 ? chosen : (Level == 1 ? prefix << 11 | chosen : 0);
    state.remaining = left;
    if (Level == 2) {
      // Among scores equal to the lowest winner, the lower head comes first. Which of its slots win does not change its
      // count.
      for (index_t h = 0; h < heads; ++h) {
        const unsigned equal = (min)(left, __ldcg(&all_bins[offset_t(first_row + h) * allot_bins + chosen]));
        left -= equal;
        const index_t tokens = in.tokens(sequence, h);
        counts[first_row + h] = kept_of(
            (min)(tokens, policy.share_won(index_t(scratch.won[first_row + h] + equal), base, tail)), tail, tokens);
      }
    }
  }
}

}  // namespace detail

/// A budget whose table of numbers by layer and kv_head lies in the caller's memory.
template <class B>
concept tabled_budget = requires(B b) {
  { b.table() } -> std::same_as<share_table&>;
};

/// A budget's table in device memory, copied once. Empty for a budget without one.
template <class Budget>
class budget_table {
 public:
  explicit budget_table(const Budget&) {}
  const Budget& on_device(const Budget& budget) const { return budget; }
};

/// The same for a budget that has one.
template <tabled_budget Budget>
class budget_table<Budget> {
 public:
  explicit budget_table(Budget budget)
      : given_(budget.table()), table_(given_.data ? std::size_t(given_.layers) * std::size_t(given_.kv_heads) : 0) {
    if (!given_.data) return;
    check(cudaMemcpy(table_.data(), given_.data, table_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // the caller's streams do not wait for it
  }

  /// The budget with its table on the device, as kernels read it.
  Budget on_device(Budget budget) const {
    share_table& table = budget.table();
    require(table.data == given_.data && table.layers == given_.layers && table.kv_heads == given_.kv_heads,
            "table of the budget", "another", "the one that the operation was made with",
            "make the cache, or the operation, with this table");
    table.data = table_.data();
    return budget;
  }

 private:
  share_table given_;
  device_buffer<double> table_;
};

/// How many tokens every (sequence, kv_head) keeps, as cpu::choose_kept counts them: the budget's share, at least the
/// protected tail, at most what is stored. A sequence in which no head exceeds the budget keeps everything.
///
/// Shapes   counts [sequences, kv_heads] on the device. They equal the counts of the host's policies, ties and rounding
///          included.
/// Errors   a budget with another table than the one that this was made with: tessera::error.
/// Cost     a length_budget: one small launch. A winners_budget: three reads of the scores, four launches; integer
///          atomics only.
template <class Budget>
class allot {
  static_assert(check_device_budget<Budget>());
  static constexpr bool by_score = !length_budget<Budget>;

 public:
  /// `budget`: its table, if it has one, is copied to the device.
  allot(index_t sequences, index_t kv_heads, index_t capacity, const device_info& device, const Budget& budget = {})
      : sequences_(sequences), rows_(sequences * kv_heads), capacity_(capacity), table_(budget) {
    require(rows_ >= 1 && rows_ <= 65535, "sequences * kv_heads", rows_, "1 to 65535", "split the batch");
    blocks_ = (std::max)(
        1, (std::min)(ceil_div(capacity, detail::allot_portion), ceil_div(2 * device.multiprocessors, rows_)));
  }

  std::size_t workspace_bytes() const { return by_score ? memory(*this, nullptr).bytes() : 0; }

  /// `layer` of `layers`: for budgets that differ between the model's layers.
  void run(const score_rows& in, const Budget& given, index_t layer, index_t layers, index_t* counts, void* workspace,
           cudaStream_t stream) const {
    given.check();
    const Budget policy = table_.on_device(given);
    const index_t rows = in.sequences * in.kv_heads;
    require(rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "construct allot for the largest batch");
    const detail::layer_of asked{layer, layers};
    if constexpr (!by_score) {
      launch_overlapping<detail::allot_by_length_entry<Budget>>(unsigned(ceil_div(rows, 128)), 128, stream,
                                                                "launch of allot", in, policy, asked, counts);
    } else {
      const memory arrays(*this, workspace);
      const detail::allot_scratch scratch{arrays.bins, arrays.state, arrays.won};
      check(cudaMemsetAsync(workspace, 0, arrays.cleared, stream), "cudaMemsetAsync");
      const dim3 grid{unsigned(blocks_), unsigned(rows)};
      detail::allot_by_score_entry<Budget, 0>
          <<<grid, detail::allot_threads, 0, stream>>>(in, policy, asked, scratch, capacity_, counts);
      detail::allot_by_score_entry<Budget, 1>
          <<<grid, detail::allot_threads, 0, stream>>>(in, policy, asked, scratch, capacity_, counts);
      detail::allot_by_score_entry<Budget, 2>
          <<<grid, detail::allot_threads, 0, stream>>>(in, policy, asked, scratch, capacity_, counts);
      check(cudaGetLastError(), "launch of allot");
    }
  }

 private:
  struct memory : workspace_cut {
    const allot& op;
    memory(const allot& owner, void* begin) : workspace_cut(begin), op(owner) {}
    unsigned* bins = array<unsigned>(std::size_t(op.rows_) * detail::allot_levels * detail::allot_bins);
    detail::allot_state* state = array<detail::allot_state>(std::size_t(op.sequences_));
    const std::size_t cleared = bytes();
    unsigned* won = array<unsigned>(std::size_t(op.rows_));
  };

  index_t sequences_, rows_, capacity_;
  budget_table<Budget> table_;
  int blocks_ = 1;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
