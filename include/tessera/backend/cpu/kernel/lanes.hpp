// The host's vector registers, as wide as the compiler's target allows.
#pragma once

#include <bit>
#include <cstring>

#include "../../../core/config.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

#if defined(__AVX512F__)
inline constexpr int lane_count = 16;
inline constexpr int accumulators = 4;  // vectors per row in a 4-row block: 16 of 32 registers
#elif defined(__AVX__)
inline constexpr int lane_count = 8;
inline constexpr int accumulators = 2;  // 8 of 16 registers
#else
inline constexpr int lane_count = 4;
inline constexpr int accumulators = 2;
#endif

using lanes = float __attribute__((vector_size(lane_count * 4)));

TESSERA_INLINE lanes load(const float* p) {
  lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TESSERA_INLINE void store(float* p, lanes x) { std::memcpy(p, &x, sizeof x); }
TESSERA_INLINE lanes splat(float x) { return x - lanes{}; }

TESSERA_INLINE lanes larger(lanes x, lanes y) { return x > y ? x : y; }

using lanes4 = float __attribute__((vector_size(16)));

/// Adds the upper half of a vector to its lower half until four lanes are left.
template <class Vector>
TESSERA_INLINE lanes4 fold(Vector x) {
  if constexpr (sizeof(Vector) == 64) {
    return fold(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (sizeof(Vector) == 32) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  } else {
    return x;
  }
}

/// {sum of a, sum of b, sum of c, sum of d}, always by the same tree: always the same bits.
TESSERA_INLINE lanes4 sums(lanes a, lanes b, lanes c, lanes d) {
  const auto pairs = [](lanes4 x, lanes4 y) {
    return __builtin_shufflevector(x, y, 0, 2, 4, 6) + __builtin_shufflevector(x, y, 1, 3, 5, 7);
  };
  return pairs(pairs(fold(a), fold(b)), pairs(fold(c), fold(d)));
}

TESSERA_INLINE float sum(lanes x) {
  const lanes4 part = fold(x);
  return (part[0] + part[1]) + (part[2] + part[3]);
}

TESSERA_INLINE float largest(lanes x) {
  float part[lane_count];
  store(part, x);
  float top = part[0];
  for (int i = 1; i < lane_count; ++i) top = part[i] > top ? part[i] : top;
  return top;
}

using words = std::uint32_t __attribute__((vector_size(lane_count * 4)));
using half_words = std::uint16_t __attribute__((vector_size(lane_count * 2)));

/// `lane_count` stored elements as fp32.
TESSERA_INLINE lanes load(const bf16* p) {
  half_words x;
  std::memcpy(&x, p, sizeof x);
  const words wide = __builtin_convertvector(x, words) << 16;
  return std::bit_cast<lanes>(wide);
}
TESSERA_INLINE lanes load(const fp16* p) {
  half_words x;
  std::memcpy(&x, p, sizeof x);
  const words bits = __builtin_convertvector(x, words);
  const words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  // As fp16::operator float does it, lane by lane.
  const lanes finite = std::bit_cast<lanes>(magnitude) * 0x1p112f;
  const words result = sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : std::bit_cast<words>(finite));
  return std::bit_cast<lanes>(result);
}

using quarter_words = std::uint8_t __attribute__((vector_size(lane_count)));
TESSERA_INLINE lanes load(const fp8* p) {
  quarter_words x;
  std::memcpy(&x, p, sizeof x);
  const words bits = __builtin_convertvector(x, words);
  const words sign = (bits & 0x80u) << 24, magnitude = (bits & 0x7fu) << 20;
  // As fp8::operator float does it, lane by lane.
  const lanes finite = std::bit_cast<lanes>(magnitude) * 0x1p120f;
  const words result = sign | (magnitude == 0x07f00000u ? words{} + 0x7fc00000u : std::bit_cast<words>(finite));
  return std::bit_cast<lanes>(result);
}
/// Of any other encoding (core/encoding.hpp).
template <class Stored>
TESSERA_INLINE lanes load(const Stored* p) {
  float x[lane_count];
  for (int i = 0; i < lane_count; ++i) x[i] = static_cast<float>(p[i]);
  return load(x);
}

/// Asks for a row that will be read soon. Without it the step waits for memory between short bursts of arithmetic.
template <int Dim, class T>
TESSERA_INLINE void prefetch_row(const T* row) {
  for (std::size_t byte = 0; byte < Dim * sizeof(T); byte += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte);
  }
}

/// Converts a row of stored elements to fp32. `Dim` is a multiple of 16.
template <int Dim, class Stored>
TESSERA_INLINE void load_row(const Stored* TESSERA_RESTRICT from, offset_t dim_stride, float* TESSERA_RESTRICT to) {
  if (dim_stride == 1) {
    for (int d = 0; d < Dim; d += lane_count) store(to + d, load(from + d));
  } else {
    for (int d = 0; d < Dim; ++d) to[d] = static_cast<float>(from[d * dim_stride]);
  }
}

/// to [Dim] *= scale.
template <int Dim>
TESSERA_INLINE void scale_row(float* to, float scale) {
  for (int d = 0; d < Dim; d += lane_count) store(to + d, load(to + d) * splat(scale));
}

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
