// Packed rows turned back into dense ones, in the engine's basis. Channels that were not kept count as 0.
#pragma once

#include "../../device/check.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Value `index` of a packed row, times its scale.
__device__ inline float packed_value(const packed_vectors& from, index_t head, index_t i, index_t index) {
  const std::byte* values = from.values_of(head, i);
  const float scale = from.scales ? from.scale_of(head, i) : 1.0f;
  switch (from.format.element) {
    case packed_element::fp16:
      return tessera::detail::load_value<fp16>(values, index);
    case packed_element::fp8:
      return tessera::detail::load_value<fp8>(values, index) * scale;
    case packed_element::int4:
      return tessera::detail::load_int4(values, index) * scale;
    default:
      return tessera::detail::load_value<bf16>(values, index);
  }
}

/// Channel `c` of a packed row in its segment's basis; 0 where it is not stored.
__device__ inline float stored_channel(const packed_vectors& from, index_t head, index_t i, index_t c) {
  const std::uint32_t* bits = from.bits_of(head, i);
  const index_t group = from.format.group, g = c / group;
  if (((bits[g / 32] >> (g % 32)) & 1u) == 0) return 0;
  index_t before = __popc(bits[g / 32] & ((1u << (g % 32)) - 1u));
  for (index_t word = 0; word < g / 32; ++word) before += __popc(bits[word]);
  return packed_value(from, head, i, before * group + c % group);
}

/// A block unpacks one slot, blockIdx.x, of one head of one sequence: to [kv_heads, slots, D].
template <class View, int D, bool Keys>
__global__ void __launch_bounds__(D) unpack_rows_entry(const __grid_constant__ View view, index_t slots, float* to) {
  __shared__ float held[D];
  const index_t head = index_t(blockIdx.y), count = view.max_segments > 0 ? view.count(0) : 0;
  const int d = int(threadIdx.x);
  index_t row = index_t(blockIdx.x), s = 0;
  for (; s < count && row >= view.segment(0, s).rows[head]; ++s) row -= view.segment(0, s).rows[head];
  float* own = to + (offset_t(head) * slots + blockIdx.x) * D;
  if (s == count) {
    own[d] = float((Keys ? view.whole.key(0, head, row) : view.whole.value(0, head, row))[d]);
    return;
  }
  const device_segment& segment = view.segment(0, s);
  const packed_vectors& from = Keys ? segment.k : segment.v;
  held[d] = d < from.format.channels ? stored_channel(from, head, row, d) : 0.0f;
  __syncthreads();
  const float* basis = from.basis_of(head, D);
  float sum = basis ? 0 : held[d];
  for (index_t c = 0; basis && c < from.format.channels; ++c) sum += held[c] * basis[offset_t(c) * D + d];
  own[d] = sum;
}

}  // namespace detail

/// Unpacks what a layer of one sequence stores: k [kv_heads, slots, k_dim], v likewise, fp32 on the device. Heads have
/// `slots` tokens each.
template <class View>
void unpack_rows(const View& view, index_t slots, float* k, float* v, cudaStream_t stream) {
  if (slots == 0) return;
  const dim3 grid{unsigned(slots), unsigned(view.whole.kv_heads)};
  detail::unpack_rows_entry<View, View::k_dim, true><<<grid, View::k_dim, 0, stream>>>(view, slots, k);
  detail::unpack_rows_entry<View, View::v_dim, false><<<grid, View::v_dim, 0, stream>>>(view, slots, v);
  check(cudaGetLastError(), "launch of unpack_rows");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
