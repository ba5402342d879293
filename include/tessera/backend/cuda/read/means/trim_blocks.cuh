// The best blocks until they hold as many tokens as a step reads, where blocks
// have several sizes.
#pragma once

#include <algorithm>

#include "../../../../math/ordered.hpp"
#include "../../device/launch.cuh"
#include "../../device/search.cuh"
#include "../../device/tuning.cuh"
#include "../../store/packed/packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Lists of blocks, each long enough, that are cut down to a budget of tokens.
/// Every pointer is a device pointer.
template <class View> struct trim_problem {
  View view;
  const float *scores = nullptr; ///< [lanes, score_stride], of all blocks
  offset_t score_stride = 0;
  index_t tokens = 0;
  index_t *lists =
      nullptr; ///< [lanes, list_stride], ascending, the best ones of all
  offset_t list_stride = 0;
  index_t *counts = nullptr; ///< [lanes]
  index_t *begins = nullptr; ///< [lanes, most_segments + 1], written: where
                             ///< each segment's blocks begin in a list
};

namespace detail {

inline constexpr int trimming_threads = 1024,
                     trimming_warps = trimming_threads / 32;

/// A block of a list as it is compared: how well it ranks, its rows in the low
/// byte, and its segment's number above them.
struct trimmed_block {
  std::uint32_t key, place;
  __device__ unsigned rows() const { return place & 255u; }
  __device__ index_t segment() const { return index_t(place >> 8); }
};

/// The sum over a block's threads, on each of them. `sums` [2, warps]; `turn`
/// alternates from call to call, so that one barrier is enough.
__device__ __forceinline__ unsigned
sum_of_threads(unsigned x, unsigned (*sums)[trimming_warps], int turn) {
  const int lane = int(threadIdx.x) % 32;
  const unsigned own = warp_sum(x);
  if (lane == 0)
    sums[turn][threadIdx.x / 32] = own;
  __syncthreads();
  return warp_sum(sums[turn][lane]);
}
/// The sum over the threads before this one; `all` = over all of them. As
/// `sum_of_threads`.
__device__ __forceinline__ unsigned sum_before(unsigned x, unsigned &all,
                                               unsigned (*sums)[trimming_warps],
                                               int turn) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const unsigned upto = inclusive_sum(x, lane);
  if (lane == 31)
    sums[turn][warp] = upto;
  __syncthreads();
  const unsigned of_warps = inclusive_sum(sums[turn][lane], lane);
  all = __shfl_sync(~0u, of_warps, 31);
  return upto - x +
         __shfl_sync(~0u, of_warps, max(warp - 1, 0)) * unsigned(warp > 0);
}

/// A block trims the list of one (sequence, kv_head). A block of tokens stays
/// if those that rank above it hold fewer tokens than are read; the first and
/// the last one of the sequence always stay. `spare` [lanes, list_stride]:
/// where shared memory has no room for a list.
template <class View>
__global__ void __launch_bounds__(trimming_threads)
    trim_blocks_entry(const __grid_constant__ trim_problem<View> p,
                      trimmed_block *spare) {
  extern __shared__ uint4 shared_memory[];
  __shared__ unsigned sums[2][trimming_warps];
  const index_t most = p.view.most_segments, lane_row = index_t(blockIdx.x),
                heads = p.view.whole.kv_heads;
  const index_t sequence = lane_row / heads, head = lane_row % heads,
                count = p.view.count(sequence);
  index_t *unit_begins =
      reinterpret_cast<index_t *>(shared_memory); // [most_segments + 1]
  auto *blocks = spare ? spare + lane_row * p.list_stride
                       : reinterpret_cast<trimmed_block *>(
                             shared_memory + ceil_div(most + 1, 4));
  const int thread = int(threadIdx.x);
  wait_for_earlier();
  let_later_begin();
  fill_begins(p.view, sequence, head, count, 0, unit_begins);
  const index_t n = p.counts[lane_row], last = unit_begins[count] - 1;
  index_t *list = p.lists + lane_row * p.list_stride;
  index_t *begins = p.begins + offset_t(lane_row) * (most + 1);
  for (index_t i = thread; i < n; i += trimming_threads) {
    const index_t id = list[i], s = first_where(count, [&](index_t j) {
                                  return unit_begins[j + 1] > id;
                                });
    const device_segment &segment = p.view.segment(sequence, s);
    const index_t rows =
        min(segment.block,
            segment.rows[head] - (id - unit_begins[s]) * segment.block);
    blocks[i] = {ordered_bits(p.scores[lane_row * p.score_stride + id]),
                 std::uint32_t(s) << 8 | std::uint32_t(rows)};
  }
  // The best key that, with all above it, holds enough tokens: bit by bit.
  int turn = 0;
  const auto rows_reaching = [&](std::uint32_t key) {
    unsigned rows = 0;
    for (index_t i = thread; i < n; i += trimming_threads)
      rows += blocks[i].key >= key ? blocks[i].rows() : 0u;
    return sum_of_threads(rows, sums, turn ^= 1);
  };
  const unsigned wanted = unsigned(p.tokens);
  std::uint32_t least = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t trial = least | 1u << bit;
    if (rows_reaching(trial) >= wanted)
      least = trial;
  }
  unsigned held =
      least == ~0u
          ? 0u
          : rows_reaching(
                least +
                1); // by all that rank above, then by ties that came before
  unsigned written = 0;
  for (index_t first = 0; first < n; first += trimming_threads) {
    const index_t i = first + thread;
    const bool there = i < n;
    const trimmed_block own = there ? blocks[i] : trimmed_block{0, 0};
    const index_t id = there ? list[i] : 0;
    const bool ties = there && own.key == least;
    unsigned tied = 0, stay = 0;
    const unsigned before =
        held + sum_before(ties ? own.rows() : 0u, tied, sums, turn ^= 1);
    const bool stays = there && (own.key > least || (ties && before < wanted) ||
                                 id == 0 || id == last);
    const unsigned to =
        written + sum_before(stays ? 1u : 0u, stay, sums, turn ^= 1);
    if (stays)
      list[to] = id; // all have read theirs, and what comes later stands behind
    if (there) {
      for (index_t s = i == 0 ? 0 : blocks[i - 1].segment() + 1;
           s <= own.segment(); ++s)
        begins[s] = index_t(to);
    }
    held += tied, written += stay;
  }
  for (index_t s = n > 0 ? blocks[n - 1].segment() + 1 : 0; s <= most; ++s)
    begins[s] = index_t(written);
  if (thread == 0)
    p.counts[lane_row] = index_t(written);
}

} // namespace detail

/// Cuts lists of blocks down to those that hold `tokens` tokens, as
/// `whole_blocks` takes blocks by their sizes: the first and the last block of
/// all, then the best ones until they hold enough; ties to the lower block, NaN
/// last.
///
/// Lists hold the best blocks of all segments, ascending, at least as many as
/// are needed whatever their sizes: see `most_chosen`. Errors   before the
/// launch: lists longer than it was made for. Limits   blocks of at most 255
/// rows. Cost     one launch; each list is read once, and compared 33 times in
/// shared memory. Recordable.
template <class View> class trim_blocks {
public:
  /// How many blocks of at least `least` rows hold `tokens` tokens, if each
  /// segment may end with a shorter one.
  static index_t most_chosen(index_t tokens, index_t least,
                             index_t most_segments) {
    return ceil_div(tokens, least) + most_segments + 2;
  }

  trim_blocks(index_t lanes, index_t longest, index_t most_segments,
              const device_info &device)
      : lanes_(lanes), longest_(longest), most_segments_(most_segments) {
    const std::size_t begins = std::size_t(ceil_div(most_segments + 1, 4)) *
                               sizeof(uint4),
                      held = list_bytes(1);
    constexpr std::size_t fixed = sizeof(unsigned) * 2 * detail::trimming_warps;
    in_shared_ = begins + held + fixed <= std::size_t(device.shared_memory);
    shared_bytes_ = begins + (in_shared_ ? held : 0);
    entry_ = detail::trim_blocks_entry<View>;
    check(cudaFuncSetAttribute(entry_,
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(device.shared_memory) - int(fixed)),
          "cudaFuncSetAttribute");
    overlapping_ = can_overlap(entry_);
  }

  std::size_t workspace_bytes() const {
    return in_shared_ ? 0 : list_bytes(std::size_t(lanes_));
  }

  void run(const trim_problem<View> &problem, void *workspace,
           cudaStream_t stream) const {
    const index_t lanes =
        problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0)
      return;
    require(lanes <= lanes_ && problem.list_stride <= longest_ &&
                problem.view.most_segments == most_segments_,
            "lists of blocks",
            std::to_string(lanes) + " x " + std::to_string(problem.list_stride),
            "at most " + std::to_string(lanes_) + " x " +
                std::to_string(longest_),
            "make the operation for them");
    launch(entry_,
           {.blocks = dim3(unsigned(lanes)),
            .threads = dim3(detail::trimming_threads),
            .shared_bytes = shared_bytes_,
            .overlapping = overlapping_},
           stream, "launch of trim_blocks", problem,
           in_shared_ ? nullptr
                      : static_cast<detail::trimmed_block *>(workspace));
  }

private:
  std::size_t list_bytes(std::size_t lanes) const {
    return lanes * std::size_t(longest_) * sizeof(detail::trimmed_block);
  }
  index_t lanes_, longest_, most_segments_;
  std::size_t shared_bytes_ = 0;
  bool in_shared_ = true, overlapping_ = false;
  // What was configured is what is launched: nvcc gives every source file a
  // kernel of its own.
  void (*entry_)(trim_problem<View>, detail::trimmed_block *) = nullptr;
};

} // namespace cuda
TESSERA_NAMESPACE_END
