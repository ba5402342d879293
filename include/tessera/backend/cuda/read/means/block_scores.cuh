// Scores of blocks by their packed mean keys on the device.
#pragma once

#include "../../../../scorer/block_mean.hpp"
#include "../../attend/packed/rotated_queries.cuh"
#include "../../device/copy.cuh"
#include "../../device/tuning.cuh"
#include "../../store/packed/walk_row.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int scoring_warps = 8, scoring_threads = scoring_warps * 32, scored_together = scoring_threads;
inline constexpr float largest_score = 3.4e38f;

/// Memory of a block: q once for every lane, and two stages of 32 rows for every warp. Values come 64 bytes at a time.
template <int D>
struct score_memory {
  static constexpr int piece = 64;  // bytes
  static constexpr int q = D * 32 * 4, stage = 32 * piece;
  static constexpr int begins = q + scoring_warps * 2 * stage;
};

/// Adds up what a row's values give with q, of which a lane has its own copy: element c lies at c * 128 bytes.
template <packed_element Element, int Group>
struct scored_row {
  const unsigned char* shared;
  float (&sums)[2];

  __device__ __forceinline__ void operator()(std::uint32_t at, const std::uint32_t* words, int j) const {
#pragma unroll
    for (int i = 0; i < Group; ++i) {
      sums[j / 2 % 2] += *reinterpret_cast<const float*>(shared + at + i * 128) *
                         value_of<Element>(words[(j + i) / values_in_word<Element>], (j + i) % values_in_word<Element>);
    }
  }
};

/// Where the scores of a segment's blocks go.
struct scored_blocks {
  float* row;            ///< of the (sequence, kv_head)
  index_t first, total;  ///< the segment's first block, and how many there are in all segments
  bool again, last;      ///< queries were scored before; none come behind these

  /// Of the segment's block i.
  __device__ __forceinline__ void put(index_t i, float score) const {
    const index_t b = first + i;
    if (again) {
      const float best = row[b];  // its own, of the queries before
      if (!(score > best || best != best)) score = best;
    }
    // The first and the last block of all are always read; nothing else is as good.
    if (last) score = b == 0 || b == total - 1 ? infinity : score > largest_score ? largest_score : score;
    row[b] = score;
  }
};

/// The mean keys of one segment, read by one warp: lane l has row l of every 32.
template <int D>
class staged_means {
  using memory = score_memory<D>;
  using places = row_places<memory::piece / 2>;

 public:
  /// `stages`: where its stages lie in the block's shared memory.
  __device__ staged_means(const packed_vectors& rows, index_t head, const unsigned char* shared, unsigned stages)
      : values_(rows.values_of(head, 0)),
        bits_(rows, head),
        scales_(rows.scales ? rows.scales + rows.row(head, 0) : nullptr),
        address_(shared_address(shared)),
        stages_(stages),
        chunks_(unsigned(value_stride(rows.format.value_bytes())) / 16),
        kept_(int(rows.format.kept)),
        pieces_(max(1, ceil_div(int(chunks_), memory::piece / 16))) {}

  /// Begins to copy the first 32 rows for `score`.
  __device__ __forceinline__ void begin(index_t first, index_t end) const {
    copy(first, end, 0);
    commit_copies();
  }
  /// q . row for rows first, first + scoring_threads, ... to `end`, 32 at a time, of which the first have begun to come.
  template <packed_element Element, int Words, int Group>
  __device__ __forceinline__ void score(index_t first, index_t end, const unsigned char* shared,
                                        const scored_blocks& take) {
    constexpr index_t step = scoring_threads;
    constexpr int each = values_in_word<Element> * (memory::piece / 4);
    if (first >= end) return;
    std::uint32_t bits[Words] = {};
    const auto load = [&](index_t row) __attribute__((always_inline)) {
      const index_t there = row < end ? row : first;  // of a row that is not there any bits: its values are 0
      bits_.load(there, bits);
      return scales_ ? scales_[there] : 1.0f;
    };
    float scale = load(first + lane_here());
    for (index_t tile = first; tile < end; tile += step) {
      wait_and_copy_next(tile, end, step, 0);
      row_walk<places, Element, Words, Group, Group * 128> walk(bits, std::uint32_t(lane_here() * 4));
      const float next_scale = load(tile + step + lane_here());
      float sums[2] = {};
      const scored_row<Element, Group> visit{shared, sums};
      if (pieces_ == 1) {
        walk.walk(kept_, shared, row_of(lane_here()), visit);
        __syncwarp();  // all have read the stage
        odd_ ^= 1;
      } else {
        for (int piece = 0;;) {
          walk.walk_up(min(kept_ - piece * each, each), shared, row_of(lane_here()), visit);
          __syncwarp();
          odd_ ^= 1;
          if (++piece == pieces_) break;
          wait_and_copy_next(tile, end, step, piece);
        }
      }
      if (const index_t i = tile + lane_here(); i < end) take.put(i, (sums[0] + sums[1]) * scale);
      scale = next_scale;
    }
    wait_copies<0>();
  }

 private:
  __device__ unsigned stage() const { return stages_ + unsigned(odd_ * memory::stage); }
  __device__ unsigned row_of(int lane) const { return stage() + places::row(unsigned(lane), memory::piece); }
  __device__ __forceinline__ void wait_and_copy_next(index_t tile, index_t end, index_t step, int piece) {
    odd_ ^= 1;
    if (piece + 1 < pieces_)
      copy(tile, end, piece + 1);
    else
      copy(tile + step, end, 0);
    odd_ ^= 1;
    commit_copies();
    wait_copies<1>();
    __syncwarp();
  }
  /// Begins to copy a piece of 32 rows; those that are not there become 0.
  __device__ __forceinline__ void copy(index_t tile, index_t end, int piece) const {
    if (tile >= end) return;
    const int lane = int(threadIdx.x) % 32;
    const std::uint32_t to = own_address(
        address_ + stage() + places::byte(places::row(unsigned(lane / 4), memory::piece), unsigned(lane % 4 * 16)));
    const unsigned own = unsigned(piece * (memory::piece / 16) + lane % 4);  // of the row's chunks
    const index_t row = tile + lane / 4;
    const unsigned chunk = unsigned(row) * chunks_ + own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool valid = row + i * 8 < end && own < chunks_;
      copy_async16(to + std::uint32_t(i * 8 * memory::piece),
                   values_ + (valid ? chunk + unsigned(i * 8) * chunks_ : 0u) * std::uint64_t(16), valid,
                   evict_first_policy());
    }
  }

  const std::byte* values_;
  bit_rows bits_;
  const float* scales_;
  std::uint32_t address_;
  unsigned stages_;
  unsigned chunks_;  // of 16 bytes that a row has
  int kept_, pieces_, odd_ = 0;
};

/// A block scores `together` blocks of rows of one (sequence, kv_head), a thread one at a time. With one row of queries, q stands in shared
/// memory once for every lane of a warp: lanes read other channels in each step, and none waits for another's bank.
template <class View>
__global__ void __launch_bounds__(scoring_threads, 3)
    score_blocks_entry(const __grid_constant__ View view, rotated_rows rotated, bool largest, index_t together,
                       float* scores, offset_t row_stride, index_t* units) {
  constexpr int D = View::k_dim;
  using memory = score_memory<D>;
  extern __shared__ uint4 shared_memory[];
  auto* shared = reinterpret_cast<unsigned char*>(shared_memory);
  float* q = reinterpret_cast<float*>(shared);  // [D, 32]
  index_t* begins = reinterpret_cast<index_t*>(shared + memory::begins);
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t sequence = lane_row / heads, head = lane_row % heads, count = view.count(sequence);
  fill_begins(view, sequence, head, count, 0, begins);
  const index_t total = begins[count];
  const index_t first = index_t(blockIdx.x) * together, last = min(first + together, total);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float* row = scores + lane_row * row_stride;
  // The launch before made the queries and waited for all else before this one began: only they are waited for, behind the first copies.
  bool waited = false;
  const auto wait = [&]() __attribute__((always_inline)) {
    wait_for_earlier();
    let_later_begin();
    if (blockIdx.x == 0 && threadIdx.x == 0) units[lane_row] = total;
    waited = true;
  };
  for (index_t s = 0; s < count; ++s) {
    const index_t low = max(first, begins[s]), high = min(last, begins[s + 1]);
    if (low >= high) continue;
    const packed_vectors means = view.segment(sequence, s).means;
    staged_means<D> staged(means, head, shared, unsigned(memory::q + warp * 2 * memory::stage));
    const index_t rows = largest ? rotated.rows : 1, begin = low - begins[s] + warp * 32, end = high - begins[s];
    for (index_t r = 0; r < rows; ++r) {
      staged.begin(begin, end);
      if (!waited) wait();
      __syncthreads();
      const float* from = rotated.row(lane_row, s, largest ? r : rotated.rows);
      // A warp's lanes load its channels, and each is given to all lanes: one trip to memory.
      constexpr int own = D / scoring_warps;
      static_assert(own <= 32 && D % scoring_warps == 0, "tessera: a warp's lanes load its channels");
      const float mine = lane < own ? from[warp * own + lane] : 0.0f;
#pragma unroll
      for (int c = 0; c < own; ++c) q[(warp * own + c) * 32 + lane] = __shfl_sync(~0u, mine, c);
      __syncthreads();
      const scored_blocks take{row, begins[s], total, r > 0, r == rows - 1};
      with_element(
          means.format.element, [&]<packed_element Element>() __attribute__((always_inline)) {
            const int walk = walk_of<D>(means.format);
            if (walk == 3) return staged.template score<Element, group_words<D, 4>, 4>(begin, end, shared, take);
            if (walk == 2) return staged.template score<Element, group_words<D, 2>, 2>(begin, end, shared, take);
            if (walk == 0) return staged.template score<Element, usual_words<D>, 1>(begin, end, shared, take);
            staged.template score<Element, group_words<D, 1>, 1>(begin, end, shared, take);
          });
    }
  }
  if (!waited) wait();
}

}  // namespace detail

/// Scores every block of every segment by the step's queries: see scorer/block_mean.hpp. The first and the last block score infinity.
///
/// Shapes   scores [sequences * kv_heads, row_stride]; units [sequences * kv_heads], how many blocks there are.
/// It follows `rotate_queries` on the stream, which made `rotated`.
/// Cost     one launch; means are read once (with `max` once for every row of queries). Recordable: lengths are read on the device.
template <class View>
class score_blocks {
 public:
  /// `capacity`: the most blocks that a (sequence, kv_head) ever has.
  score_blocks(index_t capacity, index_t most_segments)
      : capacity_(capacity), most_segments_(most_segments), device_(device_info::current()) {
    entry_ = detail::score_blocks_entry<View>;
    // What is allowed is the kernel's, not this object's: another one may need more.
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, device_.shared_memory),
          "cudaFuncSetAttribute");
    overlapping_ = can_overlap(entry_);
  }

  void run(const View& view, const rotated_rows& rotated, const block_mean& scorer, float* scores, offset_t row_stride,
           index_t* units, cudaStream_t stream) const {
    const index_t lanes = view.whole.sequences * view.whole.kv_heads;
    if (lanes == 0) return;
    require(row_stride >= capacity_, "row_stride of the scores", row_stride, "at least " + std::to_string(capacity_),
            "give every row room for the most blocks");
    const index_t together = blocks_together(lanes);
    launch(entry_,
           {.blocks = dim3(unsigned(std::max(1, ceil_div(capacity_, together))), unsigned(lanes)),
            .threads = dim3(detail::scoring_threads),
            .shared_bytes = shared_bytes(),
            .overlapping = overlapping_},
           stream, "launch of score_blocks", view, rotated, scorer.reduce == row_reduction::max, together, scores,
           row_stride, units);
  }

 private:
  /// As many as leave three thread blocks for every multiprocessor.
  index_t blocks_together(index_t lanes) const {
    const offset_t share = offset_t(lanes) * capacity_ / (3 * device_.multiprocessors);
    return index_t(share / detail::scored_together + 1) * detail::scored_together;
  }
  std::size_t shared_bytes() const {
    return std::size_t(detail::score_memory<View::k_dim>::begins) + std::size_t(most_segments_ + 1) * sizeof(index_t);
  }
  index_t capacity_, most_segments_;
  device_info device_;
  bool overlapping_ = false;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(View, rotated_rows, bool, index_t, float*, offset_t, index_t*) = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
