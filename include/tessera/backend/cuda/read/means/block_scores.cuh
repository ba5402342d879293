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
  static constexpr int words = (D + 31) / 32, bits_stride = words | 1;  // of channels; odd: lanes read other banks
  static constexpr int piece = 64, values_stride = 80;                  // bytes
  static constexpr int q = D * 32 * 4, bits = 32 * values_stride, scales = bits + 32 * bits_stride * 4;
  static constexpr int stage = scales + 32 * 4;
  static constexpr int begins = q + scoring_warps * 2 * stage;
};

/// The mean keys of one segment, read by one warp: lane l has row l of every 32.
template <int D>
class staged_means {
  using memory = score_memory<D>;

 public:
  __device__ staged_means(const packed_vectors& rows, index_t head, unsigned char* stages)
      : values_(rows.values_of(head, 0)),
        bits_(rows.bits_of(head, 0)),
        scales_(rows.scales ? rows.scales + rows.row(head, 0) : nullptr),
        stages_(stages),
        format_(rows.format),
        value_bytes_(rows.format.value_bytes()),
        words_(bit_words(rows.format)),
        kept_(rows.format.kept),
        pieces_(max(1, ceil_div(value_bytes_, memory::piece))) {}

  /// q . row for rows first, first + step, ... to `end`, 32 at a time; element c of q lies at q[c * 32]. take(row, score).
  template <packed_element Element, class Take>
  __device__ void score(index_t first, index_t end, index_t step, const float* q, const Take& take) {
    constexpr int each = values_in_word<Element> * (memory::piece / 4);
    const int lane = int(threadIdx.x) % 32, kept = kept_;
    copy(first, end, 0);
    commit_copies();
    for (index_t tile = first; tile < end; tile += step) {
      wait_and_copy_next(tile, end, step, 0);
      bit_walk<memory::words> walk(
          reinterpret_cast<const std::uint32_t*>(stage() + memory::bits) + lane * memory::bits_stride, format_);
      const float scale = scales_ ? reinterpret_cast<const float*>(stage() + memory::scales)[lane] : 1.0f;
      const int count = tile + lane < end ? kept : 0;
      float sum = 0;
      for (int piece = 0;;) {
        walk_row<Element>(
            walk, min(count - piece * each, each), stage() + lane * memory::values_stride,
            [&](int channel, std::uint32_t word, int j) { sum += q[channel * 32] * value_of<Element>(word, j); });
        __syncwarp();  // all have read the stage
        odd_ ^= 1;
        if (++piece == pieces_) break;
        wait_and_copy_next(tile, end, step, piece);
      }
      if (tile + lane < end) take(tile + lane, sum * scale);
    }
    wait_copies<0>();
  }

 private:
  __device__ unsigned char* stage() const { return stages_ + odd_ * memory::stage; }
  __device__ void wait_and_copy_next(index_t tile, index_t end, index_t step, int piece) {
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
  /// Begins to copy a piece of 32 rows, and with the first one their bits and scales.
  __device__ void copy(index_t tile, index_t end, int piece) const {
    if (tile >= end) return;
    const int lane = int(threadIdx.x) % 32;
    const std::uint32_t to = shared_address(stage());
    const index_t offset = piece * memory::piece + lane % 4 * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 8 + lane / 4;
      const bool valid = tile + row < end && offset < value_bytes_;
      copy_async16(to + std::uint32_t(row * memory::values_stride + lane % 4 * 16),
                   values_ + (valid ? offset_t(tile + row) * value_stride(value_bytes_) + offset : 0), valid);
    }
    if (piece > 0) return;
    const bool valid = tile + lane < end;
    const index_t row = valid ? tile + lane : 0;
    const std::uint32_t* bits = bits_ + (format_.own_bits ? offset_t(row) * words_ : 0);
    for (int w = 0; w < words_; ++w) {
      copy_async4(to + std::uint32_t(memory::bits + (lane * memory::bits_stride + w) * 4), bits + w, valid);
    }
    if (scales_) copy_async4(to + std::uint32_t(memory::scales + lane * 4), scales_ + row, valid);
  }

  const std::byte* values_;
  const std::uint32_t* bits_;
  const float* scales_;
  unsigned char* stages_;
  packed_format format_;
  index_t value_bytes_, words_;
  int kept_, pieces_, odd_ = 0;
};

template <class Visit>
__device__ void with_element(packed_element element, const Visit& visit) {
  switch (element) {
    case packed_element::fp16:
      return visit.template operator()<packed_element::fp16>();
    case packed_element::fp8:
      return visit.template operator()<packed_element::fp8>();
    case packed_element::int4:
      return visit.template operator()<packed_element::int4>();
    default:
      return visit.template operator()<packed_element::bf16>();
  }
}

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
  wait_for_earlier();
  let_later_begin();
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t sequence = lane_row / heads, head = lane_row % heads, count = view.count(sequence);
  fill_begins(view, sequence, head, count, 0, begins);
  const index_t total = begins[count];
  if (blockIdx.x == 0 && threadIdx.x == 0) units[lane_row] = total;
  const index_t first = index_t(blockIdx.x) * together, last = min(first + together, total);
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  float* row = scores + lane_row * row_stride;
  for (index_t s = 0; s < count; ++s) {
    const index_t low = max(first, begins[s]), high = min(last, begins[s + 1]);
    if (low >= high) continue;
    const packed_vectors means = view.segment(sequence, s).means;
    staged_means<D> staged(means, head, shared + memory::q + warp * 2 * memory::stage);
    const index_t rows = largest ? rotated.rows : 1;
    for (index_t r = 0; r < rows; ++r) {
      __syncthreads();
      const float* from = rotated.row(lane_row, s, largest ? r : rotated.rows);
      for (int i = int(threadIdx.x); i < D * 32; i += scoring_threads) q[i] = from[i / 32];
      __syncthreads();
      const auto take = [&](index_t i, float score) {
        const index_t b = begins[s] + i;
        const float best = r == 0 ? score : row[b];  // its own, of the row before
        float to = r == 0 || score > best || best != best ? score : best;
        if (r == rows - 1) {
          // The first and the last block of all are always read; nothing else is as good.
          if (b == 0 || b == total - 1)
            to = infinity;
          else if (to > largest_score)
            to = largest_score;
        }
        row[b] = to;
      };
      with_element(means.format.element, [&]<packed_element Element>() {
        staged.template score<Element>(low - begins[s] + warp * 32, high - begins[s], scoring_threads, q + lane, take);
      });
    }
  }
}

}  // namespace detail

/// Scores every block of every segment by the step's queries: see scorer/block_mean.hpp. The first and the last block score infinity.
///
/// Shapes   scores [sequences * kv_heads, row_stride]; units [sequences * kv_heads], how many blocks there are.
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
