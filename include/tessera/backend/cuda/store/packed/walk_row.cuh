// The values of one packed row and the channels that they belong to, one after another, by one thread.
#pragma once

#include <cuda_fp16.h>

#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Where the highest bit stands, counted from the highest; of 0 no place at all.
__device__ __forceinline__ int leading_zeros(std::uint32_t word) {
#ifdef __CUDA_ARCH__
  int place;
  asm("bfind.shiftamt.u32 %0, %1;" : "=r"(place) : "r"(word));
  return place;
#else
  return __builtin_clz(word);
#endif
}

/// Each of the lowest bits `Group` times: 32 / Group of them.
template <int Group>
__device__ __forceinline__ std::uint32_t repeated_bits(std::uint32_t x) {
  if constexpr (Group == 2) {
    x = (x | x << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    x = (x | x << 2) & 0x33333333u;
    x = (x | x << 1) & 0x55555555u;
    return x * 3;
  } else {
    x = (x | x << 12) & 0x000f000fu;
    x = (x | x << 6) & 0x03030303u;
    x = (x | x << 3) & 0x11111111u;
    return x * 15;
  }
}

/// Word i of a row's bits as if every channel had one of its own. `words`: how many bits there are, in words.
__device__ __forceinline__ std::uint32_t channel_bits(const std::uint32_t* bits, int words, int group, int i) {
  if (group == 1) return i < words ? bits[i] : 0u;
  if (group == 2) return i / 2 < words ? repeated_bits<2>((bits[i / 2] >> (i % 2 * 16)) & 0xffffu) : 0u;
  return i / 4 < words ? repeated_bits<4>((bits[i / 4] >> (i % 4 * 8)) & 0xffu) : 0u;
}

/// Gives the channels whose bits are set, ascending.
template <int Words>
class bit_walk {
 public:
  __device__ __forceinline__ bit_walk(const std::uint32_t* bits, const packed_format& format) {
    const int words = int(bit_words(format)), group = int(format.group);
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      words_[i] = __brev(channel_bits(bits, words, group, i));
      if (i > 0) gaps_ = gaps_ || (words_[i - 1] == 0 && words_[i] != 0);
    }
  }
  /// Whether a word without a bit stands before one that has some: then `skip` is called before `next`.
  __device__ __forceinline__ bool gaps() const { return gaps_; }
  __device__ __forceinline__ void skip() {
    for (int i = 1; i < Words && words_[0] == 0; ++i) move_up();
  }
  /// Not after the last one.
  __device__ __forceinline__ int next() {
    const int place = leading_zeros(words_[0]), channel = base_ + place;
    words_[0] &= 0x7fffffffu >> place;
    if (words_[0] == 0) move_up();
    return channel;
  }

 private:
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i + 1 < Words; ++i) words_[i] = words_[i + 1];
    base_ += 32;
  }

  std::uint32_t words_[Words];  // the highest bit is the first channel; behind the last one they are copies of it
  int base_ = 0;
  bool gaps_ = false;
};

/// How many values a word has; a row's values are read 8 at a time.
template <packed_element Element>
inline constexpr int values_in_word = Element == packed_element::fp8    ? 4
                                      : Element == packed_element::int4 ? 8
                                                                        : 2;

/// Eight values of a row: of bf16 and fp16 16 bytes, of fp8 8, of int4 4.
template <packed_element Element>
struct eight_values {
  static constexpr int words = 8 / values_in_word<Element>;
  std::uint32_t word[words];
  __device__ __forceinline__ explicit eight_values(const void* from) {
    if constexpr (words == 4) {
      const uint4 loaded = *static_cast<const uint4*>(from);
      word[0] = loaded.x, word[1] = loaded.y, word[2] = loaded.z, word[3] = loaded.w;
    } else if constexpr (words == 2) {
      const uint2 loaded = *static_cast<const uint2*>(from);
      word[0] = loaded.x, word[1] = loaded.y;
    } else {
      word[0] = *static_cast<const std::uint32_t*>(from);
    }
  }
};

/// Value i of a word as fp32, without its row's scale.
template <packed_element Element>
__device__ __forceinline__ float value_of(std::uint32_t word, int i) {
  if constexpr (Element == packed_element::bf16) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  } else if constexpr (Element == packed_element::fp16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (i * 16))));
  } else if constexpr (Element == packed_element::fp8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    std::uint32_t two;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
        : "=r"(two)
        : "r"(word >> (i / 2 * 16)));
    return __half2float(__ushort_as_half(static_cast<unsigned short>(two >> (i % 2 * 16))));
#else
    fp8 value;
    value.bits = std::uint8_t(word >> (i * 8));
    return float(value);
#endif
  } else {
    const unsigned nibble = (word >> (i * 4)) & 15u;
    const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
    return whole == -8 ? __uint_as_float(0x7fc00000u) : float(whole);
  }
}

/// Calls visit(channel, word, place in the word) for the first `count` of a row's values, which lie in shared memory.
template <packed_element Element, int Words, class Visit>
__device__ __forceinline__ void walk_row(bit_walk<Words>& walk, int count, const unsigned char* values,
                                         const Visit& visit) {
  using eight = eight_values<Element>;
  constexpr int in_word = values_in_word<Element>;
  if (walk.gaps()) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      walk.skip();
      visit(walk.next(), reinterpret_cast<const std::uint32_t*>(values)[i / in_word], i % in_word);
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < count; first += 8) {
    const eight loaded(values + first / in_word * 4);
    const int left = count - first;
    if (left >= 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) visit(walk.next(), loaded.word[j / in_word], j % in_word);
    } else {
#pragma unroll
      for (int j = 0; j < 7; ++j) {
        if (j < left) visit(walk.next(), loaded.word[j / in_word], j % in_word);
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
