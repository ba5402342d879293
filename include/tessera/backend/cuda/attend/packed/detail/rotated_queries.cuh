// A step's queries in the basis of every segment, and their sum.
#pragma once

#include <algorithm>

#include "../../../device/kernel.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../../store/packed/packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// The layout of rotated queries: [sequences, kv_heads, max_segments, rows + 1, dim], fp32, 0 behind the segment's
/// channels. A row is a token and a query head of the group, token * group + head. The last row is the sum of the
/// others, without elements that are not finite.
struct rotated_rows {
  float* data = nullptr;
  index_t max_segments = 0, rows = 0, dim = 0;

  TESSERA_HD float* row(index_t lane, index_t segment, index_t i) const {
    return data + ((offset_t(lane) * max_segments + segment) * (rows + 1) + i) * dim;
  }
};

namespace detail {

inline constexpr int rotating_threads = 256, rows_rotated_together = 16, channels_rotated_together = 32;
/// How many segments a launch has blocks for. A table has room for far more segments than there usually are: 273 in a
/// context of 1M tokens, where prompts of 65,536 make 17.
inline constexpr index_t segments_rotated_together = 32;

/// A block computes 32 channels of up to 16 rows of one (sequence, kv_head) in one segment's basis; 16 lanes compute
/// two channels. Each lane sums four of every 64 elements of a row, then the lanes' sums are added. `GoesOn`: there may
/// be more segments than blocks. The loop's state does not fit in registers then, and one segment a block takes a fifth
/// less time.
template <class View, bool GoesOn>
__global__ void __launch_bounds__(rotating_threads, View::k_dim <= 128 ? 5 : 3)
    rotate_queries_entry(const __grid_constant__ View view, rows_view<const typename View::element_type> q,
                         rotated_rows to, index_t* part_segment, index_t parts) {
  constexpr int D = View::k_dim, lanes = 16, quads = (D + lanes * 4 - 1) / (lanes * 4),
                pieces = (D + channels_rotated_together - 1) / channels_rotated_together;
  static_assert(D % 4 == 0 && rotating_threads * 2 == lanes * channels_rotated_together,
                "tessera: a lane takes four elements at a time, and 16 lanes two channels");
  extern __shared__ uint4 shared_memory[];
  float* rows = reinterpret_cast<float*>(shared_memory);  // [rows_rotated_together, D]
  wait_for_earlier();
  let_later_begin();
  const index_t heads = view.whole.kv_heads, lane_row = index_t(blockIdx.y);
  const index_t sequence = small_quotient(lane_row, heads), head = lane_row - sequence * heads,
                group = small_quotient(q.heads, heads);
  if (blockIdx.x == 0 && blockIdx.z == 0) {
    for (index_t i = index_t(threadIdx.x); i < parts; i += rotating_threads) {
      part_segment[offset_t(lane_row) * parts + i] = no_index;
    }
  }
  index_t block = index_t(blockIdx.x);
  do {
    const index_t segment_index = block / pieces;
    if (segment_index >= view.count(sequence)) return;  // alike in all threads
    const packed_vectors& keys = view.segment(sequence, segment_index).k;
    const float* basis = keys.basis_of(head, D);
    const int channels = int(keys.format.channels), part = int(threadIdx.x) % lanes;
    const int begin = block % pieces * channels_rotated_together + int(threadIdx.x) / lanes * 2;
    float4 direction[2][quads] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < quads; ++j) {
        const int at = (j * lanes + part) * 4;
        if (basis && begin + i < channels && at < D) {
          direction[i][j] = __ldg(reinterpret_cast<const float4*>(basis + offset_t(begin + i) * D + at));
        }
      }
    }
    const index_t first = index_t(blockIdx.z) * rows_rotated_together;
    const int count = int((min)(index_t(rows_rotated_together), to.rows + 1 - first));
    for (int i = int(threadIdx.x); i < count * D; i += rotating_threads) {
      const index_t row = first + i / D;
      const int d = i % D;
      float x = 0;
      if (row < to.rows) {
        const index_t token = small_quotient(row, group);
        x = float(q.row(sequence, token, head * group + row - token * group)[d]);
      } else {
        for (index_t token = 0; token < q.tokens; ++token) {
          for (index_t h = 0; h < group; ++h) {
            const float own = float(q.row(sequence, token, head * group + h)[d]);
            x += fabsf(own) < infinity ? own : 0.0f;
          }
        }
      }
      rows[i] = x;
    }
    __syncthreads();
    float* result = to.row(lane_row, segment_index, first) + begin;
    for (int r = 0; r < count; ++r, result += D) {
      float sums[2] = {};
#pragma unroll
      for (int j = 0; j < quads; ++j) {
        const int at = (j * lanes + part) * 4;
        if (at >= D) break;
        const float4 x = *reinterpret_cast<const float4*>(rows + r * D + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 y = direction[i][j];
          sums[i] += y.x * x.x + y.y * x.y + y.z * x.z + y.w * x.w;
        }
      }
      // Even lanes get the first channel's sum, odd lanes the second's.
      const float sum = lanes_sums<lanes, 2>(sums, part);
      if (part < 2 && begin + part < D)
        result[part] = begin + part >= channels ? 0.0f : basis ? sum : rows[r * D + begin + part];
    }
    if constexpr (GoesOn) {
      __syncthreads();  // before the rows are written again
      block += index_t(gridDim.x);
    }
  } while (GoesOn);
}

}  // namespace detail

/// Rotates the queries of a step for the operations that score or attend packed rows.
///
/// Shapes   q [sequences, tokens, q_heads, k_dim]; the result as `rotated_rows`, in memory of `bytes`.
/// Cost     one launch; a basis is read once for 16 rows. Recordable.
template <class View>
class rotate_queries {
  using T = typename View::element_type;

 public:
  rotate_queries(index_t sequences, index_t kv_heads, index_t q_heads, index_t tokens, index_t max_segments)
      : sequences_(sequences),
        heads_(kv_heads),
        max_segments_(max_segments),
        rows_(tokens * (q_heads / kv_heads)),
        entry_(max_segments > detail::segments_rotated_together ? detail::rotate_queries_entry<View, true>
                                                                : detail::rotate_queries_entry<View, false>) {}

  std::size_t workspace_bytes() const {
    return std::size_t(sequences_) * std::size_t(heads_) * std::size_t(max_segments_) * std::size_t(rows_ + 1) *
           View::k_dim * sizeof(float);
  }
  /// Sets `part_segment` [sequences * kv_heads, parts] to "none"; attention fills it in.
  rotated_rows run(const View& view, const rows_view<const T>& q, void* workspace, index_t* part_segment, index_t parts,
                   cudaStream_t stream) const {
    const rotated_rows to{static_cast<float*>(workspace), max_segments_, q.tokens * (q.heads / view.whole.kv_heads),
                          View::k_dim};
    require(to.rows <= rows_ && view.whole.sequences <= sequences_, "rows of queries", to.rows,
            "at most " + std::to_string(rows_), "make the operation for the longest step");
    require(view.max_segments == max_segments_, "max_segments", view.max_segments, std::to_string(max_segments_),
            "make the operation for the view's table");
    const index_t lanes = view.whole.sequences * view.whole.kv_heads;
    if (lanes == 0) return to;
    entry_.launch({.blocks = dim3(unsigned(std::clamp(max_segments_, 1, detail::segments_rotated_together) *
                                           ceil_div(View::k_dim, detail::channels_rotated_together)),
                                  unsigned(lanes), unsigned(ceil_div(to.rows + 1, detail::rows_rotated_together))),
                   .threads = dim3(detail::rotating_threads),
                   .shared_bytes = std::size_t(detail::rows_rotated_together) * View::k_dim * sizeof(float),
                   .overlapping = entry_.overlaps()},
                  stream, "launch of rotate_queries", view, q, to, part_segment, parts);
    return to;
  }

 private:
  index_t sequences_, heads_, max_segments_, rows_;
  device_kernel<View, rows_view<const T>, rotated_rows, index_t*, index_t> entry_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
