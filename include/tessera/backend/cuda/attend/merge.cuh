// The merge of partial attention results on the device, where sink logits enter once.
#pragma once

#include <algorithm>
#include <span>

#include "../../../core/attention_part.hpp"
#include "../device/alignment.cuh"
#include "../device/kernel.cuh"
#include "../device/mma.cuh"
#include "../device/softmax.cuh"
#include "../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How many parts one launch merges: each lane of a warp holds the weight of one part.
inline constexpr int max_parts = 32;

template <class Out>
struct merge_problem {
  attention_part parts[max_parts];
  int count;
  const float* sink_logits;  // [q_heads], or null
  rows_view<Out> out;
  rows_view<float> lse;  // data null: not wanted
};

__device__ __forceinline__ void write_four(float* to, const float4& x) { *reinterpret_cast<float4*>(to) = x; }
template <class Out>
__device__ __forceinline__ void write_four(Out* to, const float4& x) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_pair<Out>(x.x, x.y), pack_pair<Out>(x.z, x.w));
}

/// A warp merges one row. The output may be one of the parts: a lane writes only elements that no other lane reads, and
/// lse is written last.
template <int Dim, class Out>
__global__ void __launch_bounds__(128) merge_entry(const __grid_constant__ merge_problem<Out> p) {
  constexpr int at_once = 4, fours = (Dim / 4 + 31) / 32;
  wait_for_earlier();
  let_later_begin();
  const int lane = int(threadIdx.x % 32);
  const offset_t row = offset_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= offset_t(p.out.sequences) * p.out.tokens * p.out.heads) return;
  const index_t q_head = index_t(row % p.out.heads), token = index_t(row / p.out.heads % p.out.tokens);
  const index_t sequence = index_t(row / p.out.heads / p.out.tokens);

  const float lse = lane < p.count ? *p.parts[lane].lse.row(sequence, token, q_head) : -infinity;
  const float sink = p.sink_logits ? p.sink_logits[q_head] : -infinity;
  float top = fmaxf(lse, sink);  // the larger; NaN is ignored
  top = lanes_max<32>(top);
  // If nothing was seen, or only NaN, weights relative to 0 are 0 or NaN, and inf - inf is avoided.
  const float reference = softmax_reference(top);
  const float weight = exp2f((lse - reference) * log2e);
  const float sum = warp_sum(weight) + exp2f((sink - reference) * log2e);
  const float factor = sum == 0 ? 0.0f : 1 / sum;

  float4 x[fours] = {};
#pragma unroll 1
  for (int first = 0; first < p.count; first += at_once) {
    float4 y[at_once][fours] = {};
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const bool seen = __shfl_sync(~0u, int(lse != -infinity), first + i);
      if (!seen) continue;
      const float* from = p.parts[first + i].out.row(sequence, token, q_head);
#pragma unroll
      for (int n = 0; n < fours; ++n) {
        if (n * 32 + lane < Dim / 4) y[i][n] = reinterpret_cast<const float4*>(from)[n * 32 + lane];
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const float part = __shfl_sync(~0u, weight, first + i);
#pragma unroll
      for (int n = 0; n < fours; ++n) {
        x[n].x += y[i][n].x * part, x[n].y += y[i][n].y * part;
        x[n].z += y[i][n].z * part, x[n].w += y[i][n].w * part;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < fours; ++n) {
    if (n * 32 + lane >= Dim / 4) continue;
    const float4 whole = make_float4(x[n].x * factor, x[n].y * factor, x[n].z * factor, x[n].w * factor);
    write_four(p.out.row(sequence, token, q_head) + (n * 32 + lane) * 4, whole);
  }
  if (p.lse.data && lane == 0) {
    *p.lse.row(sequence, token, q_head) = sum == 0 ? -infinity : reference + logf(sum);
  }
}

}  // namespace detail

/// Merges attention over parts of the stored tokens into attention over all of them.
///
/// Shapes   parts as attention_part, any number of them, rows of Dim; out [sequences, tokens, q_heads, Dim], fp32, fp16
///          or bf16; lse [sequences, tokens, q_heads], or no data; sink_logits [q_heads] on the device, or null.
/// Returns  the softmax of each row over all parts and the sink, computed from the parts' log-sum-exps. Sink logits are
///          added here and nowhere else. A row that no part sees gives 0 and -infinity, or the sink's logit. A NaN in
///          any part shows in the output. Same input, same bits: parts are added in order. `out` and `lse` may be one
///          of the parts.
/// Errors   before the launch: shapes, alignment, no lse in a part; more than 32 parts need fp32 outputs with lse.
/// Cost     one launch per 32 parts, without allocation or synchronisation; reads every part once.
template <int Dim, class Out>
void merge_parts(std::span<const attention_part> parts, const float* sink_logits, const rows_view<Out>& out,
                 const rows_view<float>& lse, cudaStream_t stream) {
  static_assert(Dim % 4 == 0, "tessera: merge_parts takes rows of a multiple of 4 elements");
  static_assert(element<Out>, "tessera: merge_parts writes float, fp16 or bf16");
  using detail::max_parts;
  require_counts(out, Dim);
  const offset_t rows = offset_t(out.sequences) * out.tokens * out.heads;
  if (rows == 0) return;
  require_parts(parts, out, lse, Dim);
  require_aligned_rows("out", out, 4);
  for (const attention_part& part : parts) require_aligned_rows("out of a part", part.out, 4);
  const bool several = parts.size() > std::size_t(max_parts);
  require(!several || (std::is_same_v<Out, float> && lse.data), "parts", parts.size(),
          "at most " + std::to_string(max_parts) + " without fp32 outputs and lse",
          "merge some of them into fp32 rows, which are a part again");
  const auto entry = detail::merge_entry<Dim, Out>;
  static const bool overlapping = can_overlap(entry);
  detail::merge_problem<Out> problem{{}, 0, nullptr, out, lse};
  // The first round fills the outputs. Each later round takes them as its first part.
  do {
    const std::size_t some = (std::min)(parts.size(), std::size_t(max_parts - problem.count));
    std::copy_n(parts.begin(), some, problem.parts + problem.count);
    problem.count += int(some);
    parts = parts.subspan(some);
    if (parts.empty()) problem.sink_logits = sink_logits;
    launch(entry, {.blocks = dim3(unsigned((rows + 3) / 4)), .threads = dim3(128), .overlapping = overlapping}, stream,
           "launch of the merge of parts", problem);
    if constexpr (std::is_same_v<Out, float>) {
      problem.parts[0] = {
          {out.data, out.sequence_stride, out.token_stride, out.head_stride, out.sequences, out.tokens, out.heads},
          {lse.data, lse.sequence_stride, lse.token_stride, lse.head_stride, lse.sequences, lse.tokens, lse.heads}};
      problem.count = 1;
    }
  } while (!parts.empty());
}

}  // namespace cuda
TESSERA_NAMESPACE_END
