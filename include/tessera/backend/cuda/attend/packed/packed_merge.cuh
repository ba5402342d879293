// Parts of attention over packed rows become outputs: each segment's sum is rotated back once, then all of them are added.
#pragma once

#include "packed_kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int merging_threads = 128, merging_warps = 4, merged_columns = 32, merged_rows = 16;

/// A block merges 16 query rows of one (sequence, kv_head), 32 columns of the output. Parts of one segment stand together and are added
/// in its basis; segments follow one another, so that the same input gives the same bits.
template <class View, class Out>
__global__ void __launch_bounds__(merging_threads)
    merge_packed_entry(const __grid_constant__ packed_problem<View, Out> p, packed_parts parts) {
  constexpr int Dv = View::v_dim;
  extern __shared__ uint4 shared_memory[];
  float* acc = reinterpret_cast<float*>(shared_memory);                   // [16, Dv], in a segment's basis
  float* halves = acc + merged_rows * Dv;                                 // [warps, 16, 32]
  float* factor = halves + merging_warps * merged_rows * merged_columns;  // [16]
  float* weights = factor + merged_rows;                                  // [parts, 16]
  wait_for_earlier();
  let_later_begin();
  const index_t heads = p.view.whole.kv_heads, lane_row = index_t(blockIdx.x),
                first = index_t(blockIdx.z) * merged_rows;
  const index_t sequence = lane_row / heads, head = lane_row % heads, group = p.q.heads / heads;
  const int count = int(min(index_t(merged_rows), parts.rows - first));
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32,
            column = int(blockIdx.y) * merged_columns + lane;
  const index_t* segments = parts.segment + offset_t(lane_row) * parts.parts;
  const offset_t begin = offset_t(lane_row) * parts.parts * parts.rows;

  for (int r = warp; r < count; r += merging_warps) {
    const auto state_of = [&](index_t part) {
      return parts.states + (begin + offset_t(part) * parts.rows + first + r) * 2;
    };
    float top = -infinity, sum = 0;
    for (index_t i = lane; i < parts.parts; i += 32) {
      if (segments[i] != no_index) top = fmaxf(top, state_of(i)[0]);
    }
    top = lanes_max<32>(top);
    const float reference = top == -infinity ? 0.0f : top;
    for (index_t i = lane; i < parts.parts; i += 32) {
      float weight = 0;
      if (segments[i] != no_index) {
        weight = exp2f(state_of(i)[0] - reference);
        sum += state_of(i)[1] * weight;
      }
      weights[i * merged_rows + r] = weight;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
      const index_t row = first + r, q_head = head * group + row % group;
      float* lse = p.lse.data && blockIdx.y == 0 ? p.lse.row(sequence, row / group, q_head) : nullptr;
      factor[r] = output_weight(p.rule, q_head, top, sum, lse);
    }
  }
  __syncthreads();

  float total[merged_rows] = {};
  for (index_t part = 0; part < parts.parts;) {
    const index_t segment = segments[part];
    index_t end = part + 1;
    if (segment == no_index) {
      part = end;
      continue;
    }
    while (end < parts.parts && segments[end] == segment) ++end;
    const bool whole = segment == p.view.most_segments;
    const packed_vectors values = whole ? packed_vectors{} : p.view.segment(sequence, segment).v;
    const float* basis = values.basis_of(head, Dv);
    const int channels = basis ? int(values.format.channels) : Dv;
    for (int i = int(threadIdx.x); i < count * channels; i += merging_threads) {
      const int r = i / channels, c = i % channels;
      float sum = 0;
      for (index_t one = part; one < end; ++one) {
        const float weight = weights[one * merged_rows + r];
        if (weight == 0) continue;  // nothing was seen: what lies there is nobody's
        sum += parts.out[(begin + offset_t(one) * parts.rows + first + r) * Dv + c] * weight;
      }
      acc[r * Dv + c] = sum;
    }
    __syncthreads();
    if (column < Dv && basis) {
      for (int c = warp; c < channels; c += merging_warps) {
        const float direction = basis[offset_t(c) * Dv + column];
#pragma unroll
        for (int r = 0; r < merged_rows; ++r) {
          if (r < count) total[r] += acc[r * Dv + c] * direction;
        }
      }
    } else if (column < Dv && warp == 0) {
#pragma unroll
      for (int r = 0; r < merged_rows; ++r) {
        if (r < count) total[r] += acc[r * Dv + column];
      }
    }
    __syncthreads();
    part = end;
  }
#pragma unroll
  for (int r = 0; r < merged_rows; ++r) halves[(warp * merged_rows + r) * merged_columns + lane] = total[r];
  __syncthreads();
  if (column >= Dv) return;
  for (int r = warp; r < count; r += merging_warps) {
    float sum = 0;
    for (int w = 0; w < merging_warps; ++w) sum += halves[(w * merged_rows + r) * merged_columns + lane];
    const index_t row = first + r;
    p.out.row(sequence, row / group, head * group + row % group)[column] = Out(sum * factor[r]);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
