// Rows in a segment's basis: products on the tensor cores that are exact but for the sums' rounding.
#pragma once

#include "../../device/mma.cuh"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Two floats, and parts[i]: a pair of 16 bits of each; a float is the sum of its three parts.
template <class T>
__device__ __forceinline__ void split_pair(float x, float y, std::uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if constexpr (std::is_same_v<T, bf16>) {  // cut off, not rounded: three times 8 bits are a float's 24
      parts[i] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
      x -= __uint_as_float(__float_as_uint(x) & 0xffff0000u), y -= __uint_as_float(__float_as_uint(y) & 0xffff0000u);
    } else {
      parts[i] = pack_pair<T>(x, y);
      const __half2 taken = reinterpret_cast<const __half2&>(parts[i]);
      x -= __low2float(taken), y -= __high2float(taken);
    }
  }
}

/// Turns 32 rows into `channels` channels of a basis [channels, D], by one warp: turned [32, stride] <- rows basis^T.
///
/// `row_of(i)` points to row i, on 16 bytes, or is null for one that is not there. Of every few groups of 8 channels
/// one warp of `sharers` turns those of its `share`; all channels up to the next multiple of 8 are written.
///
/// The order of a product's terms is free: a lane takes 8 neighbours of a row in one load, and the basis alike.
template <class T, int D, class RowOf>
__device__ void rotate_rows(const RowOf& row_of, const float* basis, int channels, int share, int sharers,
                            float* turned, int stride) {
  constexpr int together = 4;  // groups of 8 channels
  const int lane = int(threadIdx.x) % 32, r = lane / 4, q = lane % 4;
  const T* rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) rows[i] = row_of(r + i * 8);
  // Each warp takes as many groups at once, up to four.
  const int each = (min)(together, ceil_div(ceil_div(channels, 8), sharers)) * 8;
#pragma unroll 1
  for (int first = share * each; first < channels; first += sharers * each) {
    const int end = (min)(channels, first + each);
    float acc[2][together][4] = {};
#pragma unroll 1
    for (int in = q * 8; in - q * 8 < D; in += 32) {
      std::uint32_t a[2][2][4];  // by 16 rows, by half of the 32 channels
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 x = rows[i] && (D % 32 == 0 || in < D) ? *reinterpret_cast<const uint4*>(rows[i] + in) : uint4{};
        a[i / 2][0][i % 2] = x.x, a[i / 2][0][i % 2 + 2] = x.y;
        a[i / 2][1][i % 2] = x.z, a[i / 2][1][i % 2 + 2] = x.w;
      }
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const int c = first + n * 8 + r;
        float4 low{}, high{};
        if (c < end && (D % 32 == 0 || in < D)) {
          const auto* from = reinterpret_cast<const float4*>(basis + offset_t(c) * D + in);
          low = from[0], high = from[1];
        }
        std::uint32_t b[4][3];
        split_pair<T>(low.x, low.y, b[0]), split_pair<T>(low.z, low.w, b[1]);
        split_pair<T>(high.x, high.y, b[2]), split_pair<T>(high.z, high.w, b[3]);
#pragma unroll
        for (int part = 0; part < 3; ++part) {
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply<T>(acc[m][n], a[m][0], b[0][part], b[1][part]);
            multiply<T>(acc[m][n], a[m][1], b[2][part], b[3][part]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < together; ++n) {
      if (first + n * 8 >= end) break;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        float* at = turned + (m * 16 + r) * stride + first + n * 8 + q * 2;
        at[0] = acc[m][n][0], at[1] = acc[m][n][1];
        at += 8 * stride;
        at[0] = acc[m][n][2], at[1] = acc[m][n][3];
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
