// The host's vector registers, as wide as the compiler's target allows.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "../../../core/config.hpp"
#include "../../../core/stored/element_blocks.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

#if defined(__AVX512F__)
/// Floats of a register.
inline constexpr int lane_count = 16;
/// Vectors that a row is added up in.
inline constexpr int accumulators = 4;  // vectors per row in a 4-row block: 16 of 32 registers
#elif defined(__AVX__)
/// Floats of a register.
inline constexpr int lane_count = 8;
/// Vectors that a row is added up in.
inline constexpr int accumulators = 2;  // 8 of 16 registers
#else
/// Floats of a register.
inline constexpr int lane_count = 4;
/// Vectors that a row is added up in.
inline constexpr int accumulators = 2;
#endif

/// As many floats as a register holds.
using lanes = float __attribute__((vector_size(lane_count * 4)));

/// `lane_count` floats from `p` on.
TESSERA_INLINE lanes load(const float* p) {
  lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
/// Writes `lane_count` floats to `p`.
TESSERA_INLINE void store(float* p, lanes x) { std::memcpy(p, &x, sizeof x); }
/// x in every lane.
TESSERA_INLINE lanes splat(float x) { return x - lanes{}; }

/// The larger one in every lane; y where one is not a number.
TESSERA_INLINE lanes larger(lanes x, lanes y) { return x > y ? x : y; }

/// Four floats.
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

/// {x0 + x1, x2 + x3, y0 + y1, y2 + y3}. Not a lambda: lambdas are implicitly constexpr, so nvcc with
/// --expt-relaxed-constexpr would compile it for the device, which has no such vectors.
TESSERA_INLINE lanes4 neighbour_sums(lanes4 x, lanes4 y) {
  return __builtin_shufflevector(x, y, 0, 2, 4, 6) + __builtin_shufflevector(x, y, 1, 3, 5, 7);
}

/// {sum of a, sum of b, sum of c, sum of d}, always by the same tree: always the same bits.
TESSERA_INLINE lanes4 sums(lanes a, lanes b, lanes c, lanes d) {
  return neighbour_sums(neighbour_sums(fold(a), fold(b)), neighbour_sums(fold(c), fold(d)));
}

/// The sum of all lanes.
TESSERA_INLINE float sum(lanes x) {
  const lanes4 part = fold(x);
  return (part[0] + part[1]) + (part[2] + part[3]);
}

/// The largest lane.
TESSERA_INLINE float largest(lanes x) {
  float part[lane_count];
  store(part, x);
  float top = part[0];
  for (int i = 1; i < lane_count; ++i) top = part[i] > top ? part[i] : top;
  return top;
}

/// As many whole numbers: without a sign, and with one.
using words = std::uint32_t __attribute__((vector_size(lane_count * 4)));
/// See `words`.
using integers = std::int32_t __attribute__((vector_size(lane_count * 4)));

/// e^x in every lane, as fast_exp of math/exp.hpp: g++ 12 makes a loop over that one into vectors for AVX-512 only.
TESSERA_INLINE lanes exp_lanes(lanes x) {
  const lanes low = splat(-87.3365f), high = splat(88.7228f);
  const lanes clamped = x < low ? low : (x > high ? high : x);
  const lanes shifted = clamped * 1.44269504f + 12582912.0f;
  const lanes n = shifted - 12582912.0f;
  lanes r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const integers exponent = std::bit_cast<integers>(shifted) - 0x4b400000;
  const integers half = exponent >> 1;
  const lanes scale_a = std::bit_cast<lanes>((half + 127) << 23);
  const lanes scale_b = std::bit_cast<lanes>((exponent - half + 127) << 23);
  const lanes result = p * scale_a * scale_b;
  return x < low ? lanes{} : (x > high ? splat(infinity) : result);
}

/// As many numbers of 16 bits.
using half_words = std::uint16_t __attribute__((vector_size(lane_count * 2)));

/// `lane_count` stored elements as fp32.
TESSERA_INLINE lanes load(const bf16* p) {
  half_words x;
  std::memcpy(&x, p, sizeof x);
  const words wide = __builtin_convertvector(x, words) << 16;
  return std::bit_cast<lanes>(wide);
}

/// Bit patterns of fp16, one in every lane, as fp16::operator float converts them.
TESSERA_INLINE lanes fp16_lanes(words bits) {
  const words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const lanes finite = std::bit_cast<lanes>(magnitude) * 0x1p112f;
  const words result = sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : std::bit_cast<words>(finite));
  return std::bit_cast<lanes>(result);
}
/// See the one of bf16.
TESSERA_INLINE lanes load(const fp16* p) {
  half_words x;
  std::memcpy(&x, p, sizeof x);
  return fp16_lanes(__builtin_convertvector(x, words));
}

/// Bit patterns of e4m3 in the highest byte of every lane, as fp8::operator float converts them. Below it may lie
/// anything.
TESSERA_INLINE lanes fp8_lanes(words bits) {
  // Keeps the sign, masks its four copies away, and shifts exponent and mantissa to their bits in fp32.
  const words x = std::bit_cast<words>(std::bit_cast<integers>(bits) >> 4) & 0x87f00000u;
  const auto not_a_number = std::bit_cast<words>((x & 0x07f00000u) == 0x07f00000u);  // all bits set is one too
  return std::bit_cast<lanes>(std::bit_cast<words>(std::bit_cast<lanes>(x) * 0x1p120f) | not_a_number);
}
/// As many bytes.
using quarter_words = std::uint8_t __attribute__((vector_size(lane_count)));
/// See the one of bf16.
TESSERA_INLINE lanes load(const fp8* p) {
  quarter_words x;
  std::memcpy(&x, p, sizeof x);
  return fp8_lanes(__builtin_convertvector(x, words) << 24);
}
/// See the one of bf16.
TESSERA_INLINE lanes load(const int8* p) {
  using signed_bytes = std::int8_t __attribute__((vector_size(lane_count)));
  signed_bytes x;
  std::memcpy(&x, p, sizeof x);
  return __builtin_convertvector(__builtin_convertvector(x, integers), lanes);
}
/// Of any other encoding (core/encoding.hpp).
template <class Stored>
TESSERA_INLINE lanes load(const Stored* p) {
  float x[lane_count];
  for (int i = 0; i < lane_count; ++i) x[i] = static_cast<float>(p[i]);
  return load(x);
}

/// Two vectors of the 2 * lane_count stored elements from p on, where `order_in_row` puts them.
template <class Stored>
TESSERA_INLINE void load_two(const Stored* p, lanes& first, lanes& second) {
  first = load(p);
  second = load(p + lane_count);
}
/// The even elements and the odd ones: three instructions, where the order of memory takes six.
TESSERA_INLINE void load_two(const bf16* p, lanes& first, lanes& second) {
  words x;
  std::memcpy(&x, p, sizeof x);
  first = std::bit_cast<lanes>(x << 16);
  second = std::bit_cast<lanes>(x & 0xffff0000u);
}
/// See the one of bf16.
TESSERA_INLINE void load_two(const fp16* p, lanes& first, lanes& second) {
  words x;
  std::memcpy(&x, p, sizeof x);
  first = fp16_lanes(x & 0xffffu);
  second = fp16_lanes(x >> 16);
}
/// A vector, twice.
template <class Half>
TESSERA_INLINE auto twice(Half x) {
  if constexpr (sizeof(Half) == 32) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
  } else if constexpr (sizeof(Half) == 16) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3);
  } else {
    return __builtin_shufflevector(x, x, 0, 1, 0, 1);
  }
}
/// A vector has each word of four elements twice, and each lane shifts another element to the top.
TESSERA_INLINE void load_two(const fp8* p, lanes& first, lanes& second) {
  using few_words = std::uint32_t __attribute__((vector_size(lane_count * 2)));
  few_words part;
  std::memcpy(&part, p, sizeof part);
  const words x = twice(part);
  words shift;
  for (int i = 0; i < lane_count; ++i) shift[i] = i < lane_count / 2 ? 24 : 16;
  first = fp8_lanes(x << shift);
  second = fp8_lanes(x << (shift - 16));
}

/// The index of element d of a row of `Dim` that is loaded by `load_two`, and its rest by `load`.
template <int Dim, class Stored>
constexpr int order_in_row(int d) {
  constexpr int two = 2 * lane_count, half = lane_count / 2;
  if (d >= Dim / two * two) return d;
  const int first = d / two * two, i = d % two;
  if (std::is_same_v<Stored, bf16> || std::is_same_v<Stored, fp16>) return first + i % 2 * lane_count + i / 2;
  if (std::is_same_v<Stored, fp8>) return first + i % 4 * half + i / 4;
  return d;
}

/// Prefetches a row that will be read soon. Without it the step waits for memory between short bursts of arithmetic.
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

/// Decodes a row of blocks.
template <int Dim, element_block Block>
TESSERA_INLINE void load_row(const Block* TESSERA_RESTRICT from, offset_t block_stride, float* TESSERA_RESTRICT to) {
  for (int b = 0; b < Dim / Block::elements; ++b) from[b * block_stride].decode(to + b * Block::elements);
}

/// to [Dim] *= scale.
template <int Dim>
TESSERA_INLINE void scale_row(float* to, float scale) {
  for (int d = 0; d < Dim; d += lane_count) store(to + d, load(to + d) * splat(scale));
}

}  // namespace cpu
TESSERA_NAMESPACE_END
