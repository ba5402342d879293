// Blocks of a row's elements with scales of their own: as ggml stores them, and groups in few bits.
#pragma once

#include <concepts>
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
/// numbers do not fit into fp16, is NaN altogether. Code i is bits [i * Bits, (i + 1) * Bits) of the words, from the
/// lowest bit of the first.
/// Bytes    Elements * Bits / 8 + 4.
template <int Bits, int Elements>
struct code_group {
  static_assert((Bits == 2 || Bits == 4) && Elements % 16 == 0);
  static constexpr int elements = Elements, bits = Bits, of_word = 32 / Bits, largest = (1 << Bits) - 1;
  fp16 lowest, step;
  std::uint32_t codes[Elements / of_word];

  TESSERA_HD TESSERA_INLINE float element(int i) const {
    return float(lowest) + float(step) * float(int(codes[i / of_word] >> (i % of_word * Bits)) & largest);
  }
  TESSERA_HD TESSERA_INLINE void decode(float* TESSERA_RESTRICT to) const {
    const float first = float(lowest), factor = float(step);
    for (int w = 0; w < Elements / of_word; ++w) {
      for (int j = 0; j < of_word; ++j)
        to[w * of_word + j] = first + factor * float(int(codes[w] >> (j * Bits)) & largest);
    }
  }
  /// Lowest and step for elements in this range, `finite` whether all of them are. NaN where a group is.
  TESSERA_HD static code_group of_range(float low, float high, bool finite) {
    code_group made{};
    made.lowest = fp16(low + 0.0f);  // never -0
    const float first = float(made.lowest);
    made.step = fp16(high > first ? (high - first) / float(largest) : 0.0f);
    const float factor = float(made.step);
    if (!finite || !(first - first == 0) || !(factor - factor == 0))
      made.lowest = made.step = fp16(bits_as<float>(0x7fc00000u));
    return made;
  }
  /// The code of an element, at its place in a word.
  TESSERA_HD std::uint32_t code_bits(float x, int i) const {
    const float factor = float(step);
    if (!(factor > 0)) return 0;
    const float exact = (x - float(lowest)) / factor;
    const float held = exact > 0 ? (exact < float(largest) ? exact : float(largest)) : 0.0f;
    return (bits_as<std::uint32_t>(held + 12582912.0f) & 0xffu) << (i % of_word * Bits);  // as int8 rounds
  }
  static code_group encode(const float* from) {
    float low = from[0], high = from[0];
    bool finite = true;
    for (int i = 0; i < Elements; ++i) {
      low = from[i] < low ? from[i] : low, high = from[i] > high ? from[i] : high;
      finite &= from[i] - from[i] == 0;
    }
    code_group made = of_range(low, high, finite);
    for (int i = 0; i < Elements; ++i) made.codes[i / of_word] |= made.code_bits(from[i], i);
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

/// Elements of a row of blocks from one of them on, as far as its block goes.
template <element_block Block>
struct block_elements {
  const Block* block;
  int first;
  TESSERA_HD TESSERA_INLINE float operator[](offset_t i) const { return block->element(first + int(i)); }
  /// The same elements of the row so many blocks behind.
  TESSERA_HD TESSERA_INLINE block_elements& operator+=(offset_t blocks) {
    block += blocks;
    return *this;
  }
};

/// The elements of a row from a channel on, by number: a pointer, or a reader of blocks. `stride`: from a stored unit
/// to the next.
template <class Stored>
TESSERA_HD TESSERA_INLINE auto row_elements(Stored* row, int channel, offset_t stride = 1) {
  using unit = std::remove_const_t<Stored>;
  if constexpr (element_block<unit>) {
    return block_elements<unit>{row + channel / unit::elements * stride, channel % unit::elements};
  } else {
    return row + channel * stride;
  }
}

TESSERA_SHARED_NAMESPACE_END
