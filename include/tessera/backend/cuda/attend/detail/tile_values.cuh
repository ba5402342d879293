// Values of tiles in shared memory, for all attention kernels: decoding of encoded rows, and values that are not
// finite.
#pragma once

#include "../../device/mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Eight stored elements times their row's scale, as 16 bytes at the shared address `to`; zeros if not valid. `from`:
/// as row_elements gives it. This is an ordinary store: other threads see it after the next barrier.
template <class T, class Elements>
__device__ __forceinline__ void store_decoded(std::uint32_t to, const Elements& from, bool valid, float scale) {
  std::uint32_t pairs[4] = {};
  if (valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack_pair<T>(float(from[i * 2]) * scale, float(from[i * 2 + 1]) * scale);
    }
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
               "r"(pairs[3])
               : "memory");
}

// Values that are not finite, in tiles with masked tokens: 0 * NaN is NaN, so a token that a row must not see would
// reach the row's output (docs/decisions/0005-nan.md).

enum class value_kind { finite, plus_infinity, minus_infinity, nan };

template <class T>
struct special_values {
  static constexpr std::uint32_t infinite = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
  static constexpr std::uint32_t bits_of_one = std::is_same_v<T, bf16> ? 0x3f80u : 0x3c00u;

  /// Of two packed elements, keeps those of kind `kind`: finite ones as they are, others as 1. Elements of other kinds
  /// become 0.
  __device__ static std::uint32_t only(std::uint32_t two, value_kind kind) {
    std::uint32_t kept = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
      const std::uint32_t x = two >> shift & 0xffffu, magnitude = x & 0x7fffu;
      const value_kind is = magnitude < infinite   ? value_kind::finite
                            : magnitude > infinite ? value_kind::nan
                            : x == magnitude       ? value_kind::plus_infinity
                                                   : value_kind::minus_infinity;
      if (is == kind) kept |= (kind == value_kind::finite ? x : bits_of_one) << shift;
    }
    return kept;
  }

  /// Not 0 if one of eight packed elements is not finite.
  __device__ static std::uint32_t found(const uint4& eight) {
    constexpr std::uint32_t lack = 0x8000u - infinite;  // added to an infinite exponent, this sets the sign bit
    constexpr std::uint32_t pair = lack << 16 | lack;
    return (((eight.x & 0x7fff7fffu) + pair) | ((eight.y & 0x7fff7fffu) + pair) | ((eight.z & 0x7fff7fffu) + pair) |
            ((eight.w & 0x7fff7fffu) + pair)) &
           0x80008000u;
  }

  /// Whether the rows' values are finite, asked by a warp; `chunk(token, i)` points at 16 bytes of them.
  template <int Tokens, int Chunks, class Chunk>
  __device__ static bool all_finite(const Chunk& chunk, int lane) {
    std::uint32_t special = 0;
    for (int id = lane; id < Tokens * Chunks; id += 32) {
      special |= found(*reinterpret_cast<const uint4*>(chunk(id / Chunks, id % Chunks)));
    }
    return __all_sync(~0u, special == 0);
  }
};

/// A product of weights and values in which a weight of 0 adds nothing even where the value is not finite.
/// `weights[m][k]` is row tile m's fragment of tokens [16 k, 16 k + 16). `fragment(k, pair, b)` gives two value
/// fragments of the same tokens: b[0] and b[1] of eight columns, b[2] and b[3] of eight more. `out[m][2 pair]` and
/// `out[m][2 pair + 1]` accumulate them. It rarely runs, so it is written to be small, not fast.
template <class T, int RowTiles, int Depth, int Columns, class Fragment>
__device__ void multiply_visible_values(const std::uint32_t (&weights)[RowTiles][Depth][4], const Fragment& fragment,
                                        float (&out)[RowTiles][Columns][4]) {
#pragma unroll
  for (int pair = 0; pair < Columns / 2; ++pair) {
#pragma unroll 1
    for (int i = 0; i <= int(value_kind::nan); ++i) {
      const auto kind = value_kind(i);
      float sum[RowTiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < Depth; ++k) {
        std::uint32_t b[4];
        fragment(k, pair, b);
#pragma unroll
        for (int part = 0; part < 4; ++part) b[part] = special_values<T>::only(b[part], kind);
#pragma unroll
        for (int m = 0; m < RowTiles; ++m) {
          multiply<T>(sum[m][0], weights[m][k], b[0], b[1]);
          multiply<T>(sum[m][1], weights[m][k], b[2], b[3]);
        }
      }
      const float special = kind == value_kind::plus_infinity    ? infinity
                            : kind == value_kind::minus_infinity ? -infinity
                                                                 : NAN;
#pragma unroll
      for (int m = 0; m < RowTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float x = sum[m][j / 4][j % 4];
          // A NaN weight makes x NaN, and the output must show it.
          out[m][pair * 2 + j / 4][j % 4] += kind == value_kind::finite || !(x > 0) ? x : special;
        }
      }
    }
  }
}

/// The same for one row tile, on arrays in memory, so that rarely run code takes no registers from the common path.
template <class T, int Depth, int Columns, class Fragment>
__device__ __noinline__ void multiply_visible_values_aside(const std::uint32_t (*weights)[4], const Fragment fragment,
                                                           float (*out)[4]) {
#pragma unroll 1
  for (int pair = 0; pair < Columns / 2; ++pair) {
    std::uint32_t own[1][Depth][4];
    float two[1][2][4];
#pragma unroll
    for (int i = 0; i < Depth * 4; ++i) own[0][i / 4][i % 4] = weights[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < 8; ++i) two[0][i / 4][i % 4] = out[pair * 2 + i / 4][i % 4];
    multiply_visible_values<T>(own, [&](int k, int, std::uint32_t(&b)[4]) { fragment(k, pair, b); }, two);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[pair * 2 + i / 4][i % 4] = two[0][i / 4][i % 4];
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
