// Blocks of a row's elements with scales of their own: as ggml stores them, and groups in few bits.
#pragma once

#include <cmath>
#include <concepts>
#include <initializer_list>
#include <type_traits>

#include "../types.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// A run of a row's elements that is stored as one unit.
///   elements         how many, a multiple of 16
///   element(i)       the i-th, decoded
///   decode(to)       writes all of them to to[0 .. elements)
template <class B>
concept element_block =
    std::is_trivially_copyable_v<B> && requires(const std::remove_const_t<B>& block, int i, float* to) {
      { B::elements } -> std::convertible_to<int>;
      { block.element(i) } -> std::same_as<float>;
      block.decode(to);
    };

/// 32 elements in 8 bits: an element is scale * value. It is ggml's block_q8_0, byte for byte.
struct int8_block {
  static constexpr int elements = 32;
  fp16 scale;
  std::int8_t values[elements];

  TESSERA_HD TESSERA_INLINE float element(int i) const { return float(scale) * float(values[i]); }
  TESSERA_HD TESSERA_INLINE void decode(float* TESSERA_RESTRICT to) const {
    const float factor = float(scale);
    for (int i = 0; i < elements; ++i) to[i] = factor * float(values[i]);
  }
};

/// 32 elements in 4 bits: an element is scale * (value - 8). The low halves of the bytes are elements 0 to 15, the high
/// halves 16 to 31. It is ggml's block_q4_0, byte for byte.
struct int4_block {
  static constexpr int elements = 32;
  fp16 scale;
  std::uint8_t pairs[elements / 2];

  TESSERA_HD TESSERA_INLINE float element(int i) const {
    return float(scale) * float(((pairs[i % 16] >> (i / 16 * 4)) & 15) - 8);
  }
  TESSERA_HD TESSERA_INLINE void decode(float* TESSERA_RESTRICT to) const {
    const float factor = float(scale);
    for (int i = 0; i < 16; ++i) to[i] = factor * float((pairs[i] & 15) - 8);
    for (int i = 0; i < 16; ++i) to[i + 16] = factor * float((pairs[i] >> 4) - 8);
  }
};

/// A block that is made of the elements which it will hold.
///   encode(from)     static: of from[0 .. elements)
template <class B>
concept made_block = element_block<B> && requires(const float* from) {
  { std::remove_const_t<B>::encode(from) } -> std::same_as<std::remove_const_t<B>>;
};

/// `Elements` elements in `Bits` bits each: an element is lowest + step * code. Lowest and step are rounded to fp16
/// before codes are chosen, each the nearest one, ties to even. A group with an element that is not finite, or whose
/// numbers do not fit into fp16, is NaN altogether.
/// Bytes    Elements * Bits / 8 + 4.
template <int Bits, int Elements>
struct code_group {
  static_assert((Bits == 2 || Bits == 4) && Elements % 16 == 0);
  static constexpr int elements = Elements, per_byte = 8 / Bits, largest = (1 << Bits) - 1;
  fp16 lowest, step;
  std::uint8_t codes[Elements / per_byte];

  TESSERA_HD TESSERA_INLINE float element(int i) const {
    return float(lowest) + float(step) * float((codes[i / per_byte] >> (i % per_byte * Bits)) & largest);
  }
  TESSERA_HD TESSERA_INLINE void decode(float* TESSERA_RESTRICT to) const {
    const float first = float(lowest), factor = float(step);
    for (int i = 0; i < Elements / per_byte; ++i) {
      for (int j = 0; j < per_byte; ++j)
        to[i * per_byte + j] = first + factor * float((codes[i] >> (j * Bits)) & largest);
    }
  }
  static code_group encode(const float* from) {
    float low = from[0], high = from[0];
    bool finite = true;
    for (int i = 0; i < Elements; ++i) {
      low = from[i] < low ? from[i] : low, high = from[i] > high ? from[i] : high;
      finite &= from[i] - from[i] == 0;
    }
    code_group made{};
    made.lowest = fp16(low);
    const float first = float(made.lowest);
    made.step = fp16(high > first ? (high - first) / float(largest) : 0.0f);
    const float factor = float(made.step);
    if (!finite || !(first - first == 0) || !(factor - factor == 0)) {
      made.lowest = made.step = fp16(std::nanf(""));
      return made;
    }
    for (int i = 0; i < Elements && factor > 0; ++i) {
      const float place = std::nearbyint((from[i] - first) / factor);
      const int code = place < 0 ? 0 : place > float(largest) ? largest : int(place);
      made.codes[i / per_byte] = std::uint8_t(made.codes[i / per_byte] | (code << (i % per_byte * Bits)));
    }
    return made;
  }
};

static_assert(sizeof(int8_block) == 34 && sizeof(int4_block) == 18 && alignof(int8_block) == 2);
static_assert(element_block<int8_block> && element_block<int4_block> && !element_block<fp8>);
static_assert(made_block<code_group<4, 64>> && sizeof(code_group<4, 64>) == 36 && sizeof(code_group<2, 64>) == 20);

/// Elements of a row that one stored unit holds: those of a block, else 1.
template <class Stored>
inline constexpr int elements_of_unit = 1;
/// Of a block.
template <element_block Block>
inline constexpr int elements_of_unit<Block> = Block::elements;

TESSERA_SHARED_NAMESPACE_END
