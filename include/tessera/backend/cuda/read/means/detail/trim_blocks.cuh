// Trims lists of the best blocks to the tokens that a step reads, where blocks have several sizes.
#pragma once

#include <algorithm>

#include "../../../../../math/ordered.hpp"
#include "../../../device/kernel.cuh"
#include "../../../device/tuning.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../../store/packed/packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// How much a step reads of each kv_head of a sequence: tokens, and how many blocks are chosen for them.
struct block_reads {
  index_t tokens = 0, blocks = 0;
  bool operator==(const block_reads&) const = default;
};

/// Lists of candidate blocks, each long enough, that are cut down to a budget of tokens. Every pointer is a device
/// pointer.
template <class View>
struct trim_problem {
  View view;
  const float* scores = nullptr;  ///< [lanes, score_stride], of all blocks
  offset_t score_stride = 0;
  index_t tokens = 0;
  index_t* candidates = nullptr;  ///< [lanes, list_stride], ascending, the best ones of all
  offset_t list_stride = 0;
  index_t* counts = nullptr;  ///< [lanes]
  index_t* begins = nullptr;  ///< [lanes, max_segments + 1], written: where each segment's blocks begin in a list
  const block_reads* reads = nullptr;  ///< [sequences], in place of `tokens`; null: the same for all
};

namespace detail {

inline constexpr int trimming_threads = 256, trimming_warps = trimming_threads / 32;

/// A list as it is compared. `keys`: how well a block ranks. `shapes`: its rows in the low byte, its segment's number
/// above them. `ids`: the block's number.
struct trimmed_list {
  std::uint32_t *keys, *shapes;
  index_t* ids;
  __device__ trimmed_list(std::uint32_t* memory, index_t longest)
      : keys(memory), shapes(memory + longest), ids(reinterpret_cast<index_t*>(memory + 2 * longest)) {}
  __device__ unsigned rows(index_t i) const { return shapes[i] & 255u; }
  __device__ index_t segment(index_t i) const { return index_t(shapes[i] >> 8); }
};

/// The sum over a block's threads, on each of them. `before` gets the sum over earlier warps. `sums` [2, warps]; `turn`
/// alternates from call to call, so that one barrier is enough.
__device__ __forceinline__ unsigned sum_of_warps(unsigned of_lane, unsigned (*sums)[trimming_warps], int turn,
                                                 unsigned* before = nullptr) {
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  const unsigned own = warp_sum(of_lane);
  if (lane == 0) sums[turn][warp] = own;
  __syncthreads();
  const unsigned one = lane < trimming_warps ? sums[turn][lane] : 0u;
  if (before) *before = warp_sum(lane < warp ? one : 0u);
  return warp_sum(one);
}

/// A thread block trims the list of one (sequence, kv_head). A block of tokens stays if the blocks that rank above it
/// hold fewer tokens than are to be read. The first and the last block of the sequence always stay. `spare` [lanes, 3,
/// list_stride] is used if a list does not fit into shared memory.
template <class View>
__global__ void __launch_bounds__(trimming_threads)
    trim_blocks_entry(const __grid_constant__ trim_problem<View> p, std::uint32_t* spare) {
  extern __shared__ uint4 shared_memory[];
  __shared__ unsigned sums[2][trimming_warps];
  __shared__ std::uint32_t lowest, highest;
  const index_t segments = p.view.max_segments, lane_row = index_t(blockIdx.x), heads = p.view.whole.kv_heads;
  const index_t sequence = lane_row / heads, head = lane_row % heads, count = p.view.count(sequence);
  auto* unit_begins = reinterpret_cast<index_t*>(shared_memory);                      // [max_segments + 1]
  auto* shapes = reinterpret_cast<int2*>(shared_memory + ceil_div(segments + 1, 4));  // [max_segments], block and rows
  auto* lists = reinterpret_cast<std::uint32_t*>(shapes + (segments + 1) / 2 * 2);
  const trimmed_list blocks(spare ? spare + 3 * lane_row * p.list_stride : lists, index_t(p.list_stride));
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (index_t s = thread; s < count; s += trimming_threads) {
    const device_segment& segment = p.view.segment(sequence, s);
    shapes[s] = make_int2(segment.block, segment.rows[head]);
  }
  if (thread == 0) lowest = ~0u, highest = 0;
  wait_for_earlier();
  let_later_begin();
  __syncthreads();
  fill_sums(count, unit_begins, [&](index_t s) { return ceil_div(shapes[s].y, shapes[s].x); });
  const index_t n = p.counts[lane_row], last = unit_begins[count] - 1;
  index_t* list = p.candidates + lane_row * p.list_stride;
  unsigned held = 0, always = 0;  // rows of all blocks, and of those that always stay
  std::uint32_t low = ~0u, high = 0;
  for (index_t i = thread; i < n; i += trimming_threads) {
    const index_t id = list[i], s = first_where(count, [&](index_t j) { return unit_begins[j + 1] > id; });
    const index_t rows = (min)(shapes[s].x, shapes[s].y - (id - unit_begins[s]) * shapes[s].x);
    const std::uint32_t key = ordered_bits(p.scores[lane_row * p.score_stride + id]);
    const bool stays = id == 0 || id == last;
    blocks.keys[i] = stays ? ~0u : key;
    blocks.shapes[i] = std::uint32_t(s) << 8 | std::uint32_t(rows), blocks.ids[i] = id;
    held += unsigned(rows), always += stays ? unsigned(rows) : 0u;
    if (!stays) low = (min)(low, key), high = (max)(high, key);
  }
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (lane == 0) atomicMin(&lowest, low), atomicMax(&highest, high);
  int turn = 0;
  held = sum_of_warps(held, sums, turn ^= 1);
  always = sum_of_warps(always, sums, turn ^= 1);
  low = lowest, high = highest;
  const auto rows_reaching = [&](std::uint32_t key) {
    unsigned rows = 0;
#pragma unroll 4
    for (index_t i = thread; i < n; i += trimming_threads) rows += blocks.keys[i] >= key ? blocks.rows(i) : 0u;
    return sum_of_warps(rows, sums, turn ^= 1);
  };
  // The best key that, together with all keys above it, holds enough tokens. It is above all keys if no tokens are
  // needed, and below all keys if all together do not hold enough.
  const unsigned wanted = unsigned(p.reads ? p.reads[sequence].tokens : p.tokens);
  std::uint32_t least = low;
  if (always >= wanted) {
    least = ~0u;
  } else if (held < wanted) {
    least = 0;
  } else {
    while (least < high) {
      const std::uint32_t trial = least + (high - least - 1) / 2 + 1;
      if (rows_reaching(trial) >= wanted)
        least = trial;
      else
        high = trial - 1;
    }
  }
  held = least == ~0u ? always : rows_reaching(least + 1);
  // Each warp processes a part of the list: it counts ties for its neighbours, counts what stays, and writes what
  // stays.
  const index_t share = ceil_div(n, trimming_threads) * 32, begin = (min)(n, warp * share),
                end = (min)(n, begin + share);
  const auto ties = [&](index_t i) { return i < end && blocks.keys[i] == least ? blocks.rows(i) : 0u; };
  unsigned tied = 0, stay = 0, to = 0;
  for (index_t i = begin + lane; i < end; i += 32) tied += ties(i);
  unsigned tied_earlier = 0;
  sum_of_warps(tied, sums, turn ^= 1, &tied_earlier);
  tied_earlier += held;
  for (index_t first = begin; first < end; first += 32) {
    const index_t i = first + lane;
    const unsigned own = ties(i), upto = inclusive_sum(own, lane);
    const bool stays =
        i < end && (blocks.keys[i] > least || blocks.keys[i] == ~0u || (own && tied_earlier + upto - own < wanted));
    tied_earlier += __shfl_sync(~0u, upto, 31);
    const unsigned staying = __ballot_sync(~0u, stays);
    if (lane == 0) blocks.keys[first] = staying;  // not compared any more
    stay += lane == 0 ? unsigned(__popc(staying)) : 0u;
    __syncwarp();
  }
  const unsigned written = sum_of_warps(stay, sums, turn ^= 1, &to);
  index_t* begins = p.begins + offset_t(lane_row) * (segments + 1);
  for (index_t first = begin; first < end; first += 32) {
    const index_t i = first + lane;
    const unsigned staying = blocks.keys[first], own = to + unsigned(__popc(staying & ((1u << lane) - 1u)));
    if (staying >> lane & 1u) list[own] = blocks.ids[i];
    if (i < end) {
      for (index_t s = i == 0 ? 0 : blocks.segment(i - 1) + 1; s <= blocks.segment(i); ++s) begins[s] = index_t(own);
    }
    to += unsigned(__popc(staying));
  }
  for (index_t s = (n > 0 ? blocks.segment(n - 1) + 1 : 0) + thread; s <= segments; s += trimming_threads) {
    begins[s] = index_t(written);
  }
  if (thread == 0) p.counts[lane_row] = index_t(written);
}

}  // namespace detail

/// Cuts lists of blocks down to those that hold `tokens` tokens, as `whole_blocks` takes blocks by their sizes: the
/// first and the last block of all, then the best ones until they hold enough; ties to the lower block, NaN last.
///
/// Lists hold the best blocks of all segments, ascending, at least as many as are needed whatever their sizes: see
/// `max_chosen`.
/// Errors   before the launch: lists longer than it was made for.
/// Limits   blocks of at most 255 rows.
/// Cost     one launch; each list is read once, and compared some 25 times in shared memory. Recordable.
template <class View>
class trim_blocks {
 public:
  /// How many blocks of at least `least` rows hold `tokens` tokens, if each segment may end with a shorter one.
  static index_t max_chosen(index_t tokens, index_t least, index_t max_segments) {
    return ceil_div(tokens, least) + max_segments + 2;
  }

  trim_blocks(index_t lanes, index_t longest, index_t max_segments, const device_info& device)
      : lanes_(lanes), longest_(longest), max_segments_(max_segments) {
    const std::size_t tables = std::size_t(ceil_div(max_segments + 1, 4)) * sizeof(uint4) +
                               std::size_t((max_segments + 1) / 2) * sizeof(uint4);
    in_shared_ = tables + list_bytes(1) <= entry_.shared_limit(device);
    shared_bytes_ = tables + (in_shared_ ? list_bytes(1) : 0);
    entry_.require_shared(shared_bytes_, device,
                          "the choice of blocks over " + std::to_string(max_segments) + " segments");
  }

  std::size_t workspace_bytes() const { return in_shared_ ? 0 : list_bytes(std::size_t(lanes_)); }

  void run(const trim_problem<View>& problem, void* workspace, cudaStream_t stream) const {
    const index_t lanes = problem.view.whole.sequences * problem.view.whole.kv_heads;
    if (lanes == 0) return;
    require(lanes <= lanes_ && problem.list_stride <= longest_ && problem.view.max_segments == max_segments_,
            "lists of blocks", std::to_string(lanes) + " x " + std::to_string(problem.list_stride),
            "at most " + std::to_string(lanes_) + " x " + std::to_string(longest_), "make the operation for them");
    entry_.launch({.blocks = dim3(unsigned(lanes)),
                   .threads = dim3(detail::trimming_threads),
                   .shared_bytes = shared_bytes_,
                   .overlapping = entry_.overlaps()},
                  stream, "launch of trim_blocks", problem,
                  in_shared_ ? nullptr : static_cast<std::uint32_t*>(workspace));
  }

 private:
  std::size_t list_bytes(std::size_t lanes) const { return 3 * lanes * std::size_t(longest_) * sizeof(std::uint32_t); }
  index_t lanes_, longest_, max_segments_;
  std::size_t shared_bytes_ = 0;
  bool in_shared_ = true;
  device_kernel<trim_problem<View>, std::uint32_t*> entry_{detail::trim_blocks_entry<View>};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
