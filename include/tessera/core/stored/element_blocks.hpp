// Blocks of a row's elements with a scale of their own, as ggml stores them.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "../types.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// A run of a row's elements that is stored as one unit.
///   elements         how many, a multiple of 32
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

static_assert(sizeof(int8_block) == 34 && sizeof(int4_block) == 18 && alignof(int8_block) == 2);
static_assert(element_block<int8_block> && element_block<int4_block> && !element_block<fp8>);

/// Elements of a row that one stored unit holds: those of a block, else 1.
template <class Stored>
inline constexpr int elements_of_unit = 1;
/// Of a block.
template <element_block Block>
inline constexpr int elements_of_unit<Block> = Block::elements;

TESSERA_SHARED_NAMESPACE_END
