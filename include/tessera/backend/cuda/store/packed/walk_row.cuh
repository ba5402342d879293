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

/// Gives the channels whose bits are set, ascending. Words without a bit are taken out before, so that a step looks at one word.
template <int Words>
class bit_walk {
 public:
  __device__ __forceinline__ bit_walk(const std::uint32_t* bits, const packed_format& format) {
    const int words = int(bit_words(format)), group = int(format.group);
    bool gap = false;
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      words_[i] = __brev(channel_bits(bits, words, group, i));
      if (i > 0) gap |= words_[i - 1] == 0 && words_[i] != 0;
    }
    if (gap) close_gaps();
  }
  /// Not after the last one.
  __device__ __forceinline__ int next() {
    const int place = leading_zeros(words_[0]);
    const int channel = int(numbers_ % 16) * 32 + place;
    words_[0] &= 0x7fffffffu >> place;
    if (words_[0] == 0) move_up();
    return channel;
  }

 private:
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i + 1 < Words; ++i) words_[i] = words_[i + 1];
    words_[Words - 1] = 0;
    numbers_ >>= 4;
  }
  __device__ __forceinline__ void close_gaps() {
    std::uint32_t given[Words], number = 0;
    numbers_ = 0;
#pragma unroll
    for (int i = 0; i < Words; ++i) given[i] = words_[i], words_[i] = 0;
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      if (given[i] == 0) continue;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        if (std::uint32_t(j) == number) words_[j] = given[i];
      }
      numbers_ |= std::uint32_t(i) << (4 * number);
      ++number;
    }
  }

  std::uint32_t words_[Words];         // the highest bit is the first channel
  std::uint32_t numbers_ = 0x76543210u;  // of the words, 4 bits each
};

/// Values of 16 bytes: of bf16 and fp16 8, of fp8 16, of int4 32.
template <packed_element Element>
inline constexpr int values_in_16_bytes = Element == packed_element::fp8    ? 16
                                          : Element == packed_element::int4 ? 32
                                                                            : 8;

/// Value i of 16 bytes as fp32, without its row's scale.
template <packed_element Element>
__device__ __forceinline__ float value_at(const std::uint32_t (&words)[4], int i) {
  if constexpr (Element == packed_element::bf16) {
    const std::uint32_t word = words[i / 2];
    return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
  } else if constexpr (Element == packed_element::fp16) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16))));
  } else if constexpr (Element == packed_element::fp8) {
    fp8 value;
    value.bits = std::uint8_t(words[i / 4] >> (i % 4 * 8));
    return float(value);
  } else {
    const unsigned nibble = (words[i / 8] >> (i % 8 * 4)) & 15u;
    const int whole = nibble < 8 ? int(nibble) : int(nibble) - 16;
    return whole == -8 ? __uint_as_float(0x7fc00000u) : float(whole);
  }
}

/// Calls visit(channel, 16 bytes as words, place in them) for `count` values. chunk(c): 16 bytes of values, the c-th.
template <packed_element Element, int Words, class Chunk, class Visit>
__device__ __forceinline__ void walk_row(bit_walk<Words>& walk, int count, const Chunk& chunk, const Visit& visit) {
  constexpr int each = values_in_16_bytes<Element>;
#pragma unroll 1
  for (int c = 0; c * each < count; ++c) {
    const uint4 loaded = chunk(c);
    const std::uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    const int left = count - c * each;
    if (left >= each) {
#pragma unroll
      for (int j = 0; j < each; ++j) visit(walk.next(), words, j);
    } else {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (j < left) visit(walk.next(), words, j);
      }
    }
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
