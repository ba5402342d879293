// Packed rows turned back into whole ones, many at a time, for attention of many queries.
#pragma once

#include "../../device/alignment.cuh"
#include "../../device/kernel.cuh"
#include "../../device/mma.cuh"
#include "detail/encode_rows.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

enum class unpacked_rows { keys, values };
inline constexpr int unpacked_together = 64, unpacking_warps = 4, unpacking_threads = unpacking_warps * 32;

/// A stored value of a row, without its scale.
template <packed_element Element>
__device__ __forceinline__ float unscaled_value(const std::byte* values, index_t i) {
  if constexpr (Element == packed_element::fp8) return tessera::detail::load_value<fp8>(values, i);
  if constexpr (Element == packed_element::int4) return tessera::detail::load_int4(values, i);
  if constexpr (Element == packed_element::fp16) return tessera::detail::load_value<fp16>(values, i);
  return tessera::detail::load_value<bf16>(values, i);
}

/// Writes the values of one row, without its scale, to the channels that they belong to, by one warp: a lane has every
/// 32nd group of channels. Other channels are not written.
template <class T>
__device__ __forceinline__ void scatter_values(const packed_vectors& vectors, index_t head,
                                               const packed_row_address& address, int lane, T* spread) {
  const packed_format& format = vectors.format;
  const std::byte* values = vectors.values_of(head, address);
  const std::uint32_t* bits = format.own_bits ? vectors.own_bits_of(head, address) : vectors.set_of(head);
  const int group = int(format.group), words = int(bit_words(format));
  with_element(format.element, [&]<packed_element Element>() {
    int earlier = 0;
#pragma unroll 4
    for (int word = 0; word < words; ++word) {
      const std::uint32_t set = bits[word];
      const int stored = (earlier + __popc(set & ((1u << lane) - 1u))) * group, channel = (word * 32 + lane) * group;
      for (int c = 0; (set >> lane & 1u) && c < group; ++c)
        spread[channel + c] = T(unscaled_value<Element>(values, stored + c));
      earlier += __popc(set);
    }
  });
}

/// A block writes up to 64 slots of one kv_head, of those from `first` on, to `target`: keys where blockIdx.z is 0,
/// else values. Each segment's rows among them are spread out in shared memory and turned back together: a warp has
/// every fourth group of 8 elements.
template <class View, class Whole, int D, unpacked_rows Rows>
__device__ void unpack_side(const View& view, index_t first, index_t count, const Whole& target,
                            unsigned char* shared) {
  using T = typename View::element_type;
  constexpr int stride = D + 8, groups = ceil_div(D / 8, unpacking_warps);
  T* const spread = reinterpret_cast<T*>(shared);                                                   // [64, stride]
  float* const scales = reinterpret_cast<float*>(shared + unpacked_together * stride * sizeof(T));  // [64]
  const index_t head = index_t(blockIdx.y), begin = index_t(blockIdx.x) * unpacked_together;
  const int rows = int((min)(index_t(unpacked_together), count - begin));
  const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32, r = lane / 4, q = lane % 4;
  const index_t low = first + begin;  // the tile's first slot
  index_t earlier = 0;                // rows of earlier segments
  for (index_t s = 0; s < view.count(0); ++s) {
    const device_segment& segment = view.segment(0, s);
    const index_t length = segment.rows[head];
    const index_t first_slot = (max)(low, earlier), end_slot = (min)(low + rows, earlier + length);
    if (first_slot < end_slot) {
      const packed_vectors& vectors = Rows == unpacked_rows::keys ? segment.k : segment.v;
      const float* basis = vectors.basis_of(head, D);
      const int channels = int(vectors.format.channels), depth = (channels + 15) / 16 * 16;
      __syncthreads();
      for (int i = thread; i < unpacked_together * stride / 2; i += unpacking_threads)
        reinterpret_cast<std::uint32_t*>(spread)[i] = 0;
      __syncthreads();
      const int first_row = int(first_slot - low), end_row = int(end_slot - low);
#pragma unroll 2
      for (int i = first_row + warp; i < end_row; i += unpacking_warps) {
        const packed_row_address address = vectors.locate(low + i - earlier);
        scatter_values(vectors, head, address, lane, spread + i * stride);
        if (lane == 0) scales[i] = vectors.scales ? vectors.scale_of(head, address) : 1.0f;
      }
      __syncthreads();
      const auto write = [&](int row, int d, float x, float y) {
        if (row < first_row || row >= end_row) return;
        auto* elements =
            (Rows == unpacked_rows::keys ? target.key(0, head, begin + row) : target.value(0, head, begin + row)) + d;
        *reinterpret_cast<std::uint32_t*>(elements) = pack_pair<T>(x * scales[row], y * scales[row]);
      };
      if (!basis) {
        for (int i = first_row * (D / 2) + thread; i < end_row * (D / 2); i += unpacking_threads) {
          const int row = i / (D / 2), d = i % (D / 2) * 2;
          write(row, d, float(spread[row * stride + d]), float(spread[row * stride + d + 1]));
        }
      } else {
        float acc[groups][4][4] = {};  // by group of elements, by 16 rows
#pragma unroll 1
        for (int c = 0; c < depth; c += 16) {
          std::uint32_t a[4][4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const T* values = spread + (m * 16 + lane % 16) * stride + c + lane / 16 * 8;
            load_matrices(a[m], shared_address(values));
          }
#pragma unroll
          for (int g = 0; g < groups; ++g) {
            const int n = (g * unpacking_warps + warp) * 8;
            if (n >= D) break;
            const auto element = [&](int channel) {
              return channel < channels ? __ldg(basis + offset_t(channel) * D + n + r) : 0.0f;
            };
            std::uint32_t b0[3], b1[3];  // two parts of three are more than the result's 8 or 11 bits
            split_pair<T>(element(c + q * 2), element(c + q * 2 + 1), b0);
            split_pair<T>(element(c + q * 2 + 8), element(c + q * 2 + 9), b1);
#pragma unroll
            for (int part = 0; part < 2; ++part) {
#pragma unroll
              for (int m = 0; m < 4; ++m) multiply<T>(acc[g][m], a[m], b0[part], b1[part]);
            }
          }
        }
#pragma unroll
        for (int g = 0; g < groups; ++g) {
          const int n = (g * unpacking_warps + warp) * 8;
          if (n >= D) break;
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            write(m * 16 + r, n + q * 2, acc[g][m][0], acc[g][m][1]);
            write(m * 16 + r + 8, n + q * 2, acc[g][m][2], acc[g][m][3]);
          }
        }
      }
    }
    earlier += length;
    if (earlier >= low + rows) break;
  }
}

template <class View, class Whole>
__global__ void __launch_bounds__(unpacking_threads)
    unpack_slots_entry(const __grid_constant__ View view, index_t first, index_t count,
                       const __grid_constant__ Whole target, index_t* lengths) {
  constexpr int k_dim = View::k_dim, v_dim = View::v_dim, larger = k_dim > v_dim ? k_dim : v_dim;
  __shared__ __align__(16) unsigned char shared[unpacked_together * ((larger + 8) * 2 + sizeof(float))];
  if (blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0) {
    index_t packed = 0;
    for (index_t s = 0; s < view.count(0); ++s) packed += view.segment(0, s).rows[blockIdx.y];
    lengths[blockIdx.y] = (min)((max)(packed - first, 0), count);
  }
  if (blockIdx.z == 0)
    unpack_side<View, Whole, k_dim, unpacked_rows::keys>(view, first, count, target, shared);
  else
    unpack_side<View, Whole, v_dim, unpacked_rows::values>(view, first, count, target, shared);
}

}  // namespace detail

/// Turns packed slots first, ..., first + count - 1 of one sequence's layer back into whole rows in the engine's basis,
/// as slots from 0 on of `target`, which has room for them. Channels that were not stored count as 0; elements are
/// rounded to the cache's type once.
/// Shapes   lengths [kv_heads], on the device: `count` is written, or how many of these slots a shorter head has.
/// Errors   before the launch: slots that are not packed, rows not on 16 bytes: tessera::error.
/// Cost     one launch; packed rows are read once, a basis once for 64 rows.
template <class View, class Whole>
void unpack_slots(const View& view, index_t first, index_t count, const Whole& target, index_t* lengths,
                  cudaStream_t stream) {
  static_assert(Whole::is_raw && sizeof(typename View::element_type) == 2,
                "tessera: rows that are packed on the device are raw rows of 16 bits");
  require(first >= 0 && count >= 0 && first + count <= view.packed, "packed slots", first + count,
          "at most " + std::to_string(view.packed), "pass slots that are packed");
  require_rows_on_16_bytes("whole keys", target.k, target.k_strides);
  require_rows_on_16_bytes("whole values", target.v, target.v_strides);
  if (count == 0) return;
  launch(detail::unpack_slots_entry<View, Whole>,
         {.blocks = dim3(unsigned(ceil_div(count, detail::unpacked_together)), unsigned(view.whole.kv_heads), 2),
          .threads = dim3(detail::unpacking_threads)},
         stream, "launch of unpack_slots", view, first, count, target, lengths);
}

}  // namespace cuda
TESSERA_NAMESPACE_END
