// Number types: counts are 32-bit, offsets 64-bit; fp16 and bf16 are storage only, arithmetic is fp32.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "config.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

using index_t = std::int32_t;   ///< tokens, heads, slots, counts; -1 pads an index list
using offset_t = std::int64_t;  ///< strides, byte counts, addresses within a tensor

inline constexpr index_t no_index = -1;                                    ///< pads an index list
inline constexpr float infinity = std::numeric_limits<float>::infinity();  ///< of fp32

/// std::bit_cast for device code: nvcc refuses to call the library's without --expt-relaxed-constexpr.
template <class To, class From>
TESSERA_HD TESSERA_INLINE constexpr To bits_as(const From& value) noexcept {
  static_assert(sizeof(To) == sizeof(From), "tessera: bits_as needs types of one size");
  return __builtin_bit_cast(To, value);
}

/// bfloat16 in storage: the upper half of an fp32. Rounds to nearest even; NaN stays NaN.
struct bf16 {
  std::uint16_t bits;
  bf16() = default;
  TESSERA_HD TESSERA_INLINE explicit bf16(float value) {
    const auto word = bits_as<std::uint32_t>(value);
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = std::uint16_t(is_nan ? (word >> 16) | 0x40u : (word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  TESSERA_HD TESSERA_INLINE operator float() const { return bits_as<float>(std::uint32_t(bits) << 16); }
};

/// IEEE half precision in storage. Written with integer arithmetic and no branches, so that loops over it vectorise.
struct fp16 {
  std::uint16_t bits;
  fp16() = default;
  TESSERA_HD TESSERA_INLINE explicit fp16(float value) {
    const auto word = bits_as<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 16) & 0x8000u, magnitude = word & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      half = 0x7c00u;  // rounds to infinity
    } else if (magnitude < 0x38800000u) {
      // A subnormal half: adding 0.5 puts the rounded mantissa into the low bits of the sum.
      half = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      half = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    bits = std::uint16_t(sign | half);
  }
  TESSERA_HD TESSERA_INLINE operator float() const {
    const std::uint32_t sign = std::uint32_t(bits & 0x8000u) << 16, magnitude = std::uint32_t(bits & 0x7fffu) << 13;
    // 2^112 moves the exponent bias from half to single and normalises subnormals; the maximal exponent stays special.
    const std::uint32_t finite = bits_as<std::uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    const std::uint32_t special = magnitude | 0x7f800000u;
    return bits_as<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
  }
};

/// e4m3 in storage: sign, 4 bits of exponent, 3 of mantissa; no infinity. Rounds to nearest even. What is finite and
/// too large becomes 448, the largest; an infinity does not fit and becomes NaN.
struct fp8 {
  std::uint8_t bits;
  fp8() = default;
  TESSERA_HD TESSERA_INLINE explicit fp8(float value) {
    const auto word = bits_as<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 24) & 0x80u, magnitude = word & 0x7fffffffu;
    std::uint32_t code;
    if (magnitude >= 0x7f800000u) {
      code = 0x7fu;  // NaN
    } else if (magnitude >= 0x43e80000u) {
      code = 0x7eu;  // 464 and more would round beyond 448
    } else if (magnitude < 0x3c800000u) {
      // Subnormal: adding 2^14 puts the rounded mantissa into the low bits of the sum.
      code = bits_as<std::uint32_t>(bits_as<float>(magnitude) + 16384.0f) - 0x46800000u;
    } else {
      code = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    }
    bits = std::uint8_t(sign | code);
  }
  TESSERA_HD TESSERA_INLINE operator float() const {
    const std::uint32_t sign = std::uint32_t(bits & 0x80u) << 24, magnitude = bits & 0x7fu;
    const std::uint32_t finite = bits_as<std::uint32_t>(bits_as<float>(magnitude << 20) * 0x1p120f);
    return bits_as<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
  }
};

/// A whole number from -127 to 127 in storage. Rounds to nearest even; what is larger becomes 127. It has no NaN: that
/// becomes 0.
struct int8 {
  std::int8_t bits;
  int8() = default;
  TESSERA_HD TESSERA_INLINE explicit int8(float value) {
    const float held = value > -127 ? (value < 127 ? value : 127.0f) : (value <= -127 ? -127.0f : 0.0f);
    // Adding 1.5 * 2^23 puts the rounded number into the low bits of the sum.
    bits = std::int8_t(bits_as<std::uint32_t>(held + 12582912.0f) & 0xffu);
  }
  TESSERA_HD TESSERA_INLINE operator float() const { return float(bits); }
};

using fp32 = float;  ///< so that it has a name beside fp16 and bf16

/// What engines hand over, and what K and V may be stored as without an encoding (core/encoding.hpp).
template <class T>
concept element = std::same_as<T, fp32> || std::same_as<T, fp16> || std::same_as<T, bf16>;

/// The element types of rows of queries, keys, values and outputs. Integers are not allowed: it would be unclear
/// whether they hold numbers or the bits of a floating-point type.
template <class T>
concept row_element = element<T> || std::same_as<T, fp8>;

/// Bits of fp16, bf16 or fp8 that an engine keeps in unsigned integers (ggml, ONNX Runtime), seen as elements:
/// as_elements<bf16>(bits).
template <row_element T>
requires(!std::same_as<T, fp32>) const T* as_elements(const decltype(T::bits)* bits) {
  return reinterpret_cast<const T*>(bits);
}
/// The same of bits that may be written.
template <row_element T>
requires(!std::same_as<T, fp32>) T* as_elements(decltype(T::bits)* bits) {
  return reinterpret_cast<T*>(bits);
}

/// Head dims that kernels are built for; 512 on the CPU alone, and not where rows are packed.
template <int D>
inline constexpr bool supported_head_dim =
    D == 64 || D == 80 || D == 96 || D == 128 || D == 192 || D == 256 || D == 512;
/// Dims of latent rows: 512 elements that are key and value, and 64 of the key alone, which carry the position.
template <int D, int Dv>
inline constexpr bool supported_latent_dims = D == 576 && Dv == 512;
inline constexpr index_t largest_head_dim = 256;  ///< the largest of a GPU's kernels, and of packed rows

/// a / b rounded up; b >= 1.
TESSERA_HD TESSERA_INLINE constexpr index_t ceil_div(index_t a, index_t b) {
#ifdef __CUDA_ARCH__
  return (a + b - 1) / b;  // no 64-bit division in kernels: what reaches them is bounded
#else
  return index_t((offset_t(a) + b - 1) / b);
#endif
}

TESSERA_SHARED_NAMESPACE_END
