// Scores of blocks by their packed mean keys on the device.
#pragma once

#include <cuda_fp16.h>

#include "../../../../scorer/block_mean.hpp"
#include "../../attend/packed/rotated_queries.cuh"
#include "../../device/tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int scoring_threads = 256, blocks_scored_together = 1024;
inline constexpr float largest_score = 3.4e38f;

/// Values of 16 bytes as fp32: bf16 and fp16 8 of them, fp8 16, int4 32.
template <packed_element Element>
inline constexpr int values_in_16_bytes = Element == packed_element::fp8    ? 16
                                          : Element == packed_element::int4 ? 32
                                                                            : 8;

template <packed_element Element>
__device__ __forceinline__ float value_at(const std::uint32_t (&words)[4], int i) {
  if constexpr (Element == packed_element::bf16) {
    const std::uint32_t word = words[i / 2];
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else if constexpr (Element == packed_element::fp16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
  } else if constexpr (Element == packed_element::fp8) {
    fp8 value;
    value.bits = std::uint8_t(words[i / 4] >> (i % 4 * 8));
    return float(value);
  } else {
    const unsigned nibble = (words[i / 8] >> (i % 8 * 4)) & 15u;
    const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
    return whole == -8 ? __uint_as_float(0x7fc00000u) : float(whole);
  }
}

/// One thread's dot product of one packed row with q, element c of which lies at q[c * step].
template <packed_element Element, int Group>
__device__ float packed_row_dot(const packed_vectors& rows, index_t head, index_t i, const float* q, int step) {
  constexpr int each = values_in_16_bytes<Element>;
  const index_t kept = rows.format.kept, words = bit_words(rows.format);
  const std::uint32_t* bits = rows.bits_of(head, i);
  const auto* values = reinterpret_cast<const uint4*>(rows.values_of(head, i));
  index_t word = 0, channel = 0;
  std::uint32_t left = bits[0];
  float sum = 0;
  for (index_t place = 0; place < kept; place += each) {
    const uint4 loaded = *values++;
    const std::uint32_t chunk[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int j = 0; j < each; ++j) {
      if (place + j >= kept) break;
      if (j % Group == 0) {
        while (left == 0 && word + 1 < words) left = bits[++word];
        channel = (word * 32 + __ffs(int(left)) - 1) * Group;
        left &= left - 1;
      }
      sum += q[(channel + j % Group) * step] * value_at<Element>(chunk, j);
    }
  }
  return rows.scales ? sum * rows.scales[rows.row(head, i)] : sum;
}

template <class Visit>
__device__ void with_format(const packed_format& format, const Visit& visit) {
  const auto with_group = [&]<packed_element Element>() {
    if (format.group == 1) return visit.template operator()<Element, 1>();
    if (format.group == 2) return visit.template operator()<Element, 2>();
    visit.template operator()<Element, 4>();
  };
  switch (format.element) {
    case packed_element::fp16:
      return with_group.template operator()<packed_element::fp16>();
    case packed_element::fp8:
      return with_group.template operator()<packed_element::fp8>();
    case packed_element::int4:
      return with_group.template operator()<packed_element::int4>();
    default:
      return with_group.template operator()<packed_element::bf16>();
  }
}

/// A block scores 1,024 blocks of rows of one (sequence, kv_head), a thread one at a time. With one row of queries, q stands in shared
/// memory once for every lane of a warp: lanes read other channels in each step, and none waits for another's bank.
template <class View>
__global__ void __launch_bounds__(scoring_threads)
    score_blocks_entry(const __grid_constant__ View view, rotated_rows rotated, bool largest, float* scores,
                       offset_t row_stride, index_t* units) {
  constexpr int D = View::k_dim;
  extern __shared__ uint4 shared_memory[];
  float* q = reinterpret_cast<float*>(shared_memory);  // [D, 32]
  index_t* begins = reinterpret_cast<index_t*>(q + D * 32);
  wait_for_earlier();
  let_later_begin();
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t sequence = lane_row / heads, head = lane_row % heads, count = view.count(sequence);
  fill_begins(view, sequence, head, count, 0, begins);
  const index_t total = begins[count];
  if (blockIdx.x == 0 && threadIdx.x == 0) units[lane_row] = total;
  const index_t first = index_t(blockIdx.x) * blocks_scored_together;
  const index_t last = min(first + blocks_scored_together, total);
  const int lane = int(threadIdx.x) % 32;
  float* row = scores + lane_row * row_stride;
  for (index_t s = 0; s < count; ++s) {
    const index_t low = max(first, begins[s]), high = min(last, begins[s + 1]);
    if (low >= high) continue;
    const packed_vectors means = view.segment(sequence, s).means;
    const index_t rows = largest ? rotated.rows : 1;
    for (index_t r = 0; r < rows; ++r) {
      __syncthreads();
      const float* from = rotated.row(lane_row, s, largest ? r : rotated.rows);
      for (int i = int(threadIdx.x); i < D * 32; i += scoring_threads) q[i] = from[i / 32];
      __syncthreads();
      with_format(means.format, [&]<packed_element Element, int Group>() {
        for (index_t b = low + index_t(threadIdx.x); b < high; b += scoring_threads) {
          const float score = packed_row_dot<Element, Group>(means, head, b - begins[s], q + lane, 32);
          const float best = r == 0 ? score : row[b];  // its own, of the row before
          const bool better = r == 0 || score > best || best != best;
          row[b] = better ? score : best;
        }
      });
    }
    // The first and the last block of all are always read; nothing else is as good.
    for (index_t b = low + index_t(threadIdx.x); b < high; b += scoring_threads) {
      if (b == 0 || b == total - 1) {
        row[b] = infinity;
      } else if (row[b] > largest_score) {
        row[b] = largest_score;
      }
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
  score_blocks(index_t capacity, index_t most_segments) : capacity_(capacity), most_segments_(most_segments) {
    entry_ = detail::score_blocks_entry<View>;
    // What is allowed is the kernel's, not this object's: another one may need more.
    check(
        cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, device_info::current().shared_memory),
        "cudaFuncSetAttribute");
  }

  void run(const View& view, const rotated_rows& rotated, const block_mean& scorer, float* scores, offset_t row_stride,
           index_t* units, cudaStream_t stream) const {
    const index_t lanes = view.whole.sequences * view.whole.kv_heads;
    if (lanes == 0) return;
    require(row_stride >= capacity_, "row_stride of the scores", row_stride, "at least " + std::to_string(capacity_),
            "give every row room for the most blocks");
    launch(entry_,
           {.blocks = dim3(unsigned(std::max(1, ceil_div(capacity_, detail::blocks_scored_together))), unsigned(lanes)),
            .threads = dim3(detail::scoring_threads),
            .shared_bytes = shared_bytes()},
           stream, "launch of score_blocks", view, rotated, scorer.reduce == row_reduction::max, scores, row_stride,
           units);
  }

 private:
  std::size_t shared_bytes() const {
    return std::size_t(View::k_dim) * 32 * sizeof(float) + std::size_t(most_segments_ + 1) * sizeof(index_t);
  }
  index_t capacity_, most_segments_;
  // What was configured is what is launched: nvcc gives every source file a kernel of its own.
  void (*entry_)(View, rotated_rows, bool, float*, offset_t, index_t*) = nullptr;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
