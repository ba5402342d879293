// The values of one packed row and the channels that they belong to, one after another, by one thread.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>
#include <bit>

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

/// The bits of words, one after another: the highest of the first word, and so on. What the caller counts from word to word goes
/// `Step` further with each.
template <int Words, int Step>
struct bit_stream {
  std::uint32_t words[Words];  // the first is at hand; behind the last one they are copies of it
  std::uint32_t base;          // what the caller counts, of the word at hand

  /// Where the next bit stands in its word, counted from the highest, and the word's `base`. Not after the last bit, nor where a
  /// word without any is at hand.
  __device__ __forceinline__ int next(std::uint32_t& of) {
    const int place = leading_zeros(words[0]);
    of = base;
    drop(0x7fffffffu >> place);
    return place;
  }
  /// Words without a bit before the next one that has some.
  __device__ __forceinline__ void drop_empty() {
#pragma unroll
    for (int i = 1; i < Words; ++i) {
      if (words[0] == 0) move_up();
    }
  }

 private:
  __device__ __forceinline__ void move_up() {
#pragma unroll
    for (int i = 0; i + 1 < Words; ++i) words[i] = words[i + 1];
    base += std::uint32_t(Step);
  }
  /// Keeps the bits of `left` alone, and goes on to the next word if there are none.
  __device__ __forceinline__ void drop(std::uint32_t left) {
    // Left to itself the compiler adds to a copy of `base` and selects one of the two: an instruction more for each value.
    if constexpr (Words == 3) {
      asm("{\n.reg .pred done;\nand.b32 %0, %0, %4;\nsetp.eq.u32 done, %0, 0;\n@done mov.b32 %0, %1;\n"
          "@done mov.b32 %1, %2;\n@done add.u32 %3, %3, %5;\n}\n"
          : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(base)
          : "r"(left), "n"(Step));
    } else {
      words[0] &= left;
      if (Words > 1 && words[0] == 0) move_up();
    }
  }
};

/// How many values a word has; a row's values are read 4 at a time.
template <packed_element Element>
inline constexpr int values_in_word = Element == packed_element::fp8    ? 4
                                      : Element == packed_element::int4 ? 8
                                                                        : 2;

/// Four values of a row: of bf16 and fp16 8 bytes, of fp8 4, of int4 2.
template <packed_element Element>
struct four_values {
  static constexpr int words = values_in_word<Element> == 2 ? 2 : 1;
  std::uint32_t word[words];
  __device__ __forceinline__ explicit four_values(const void* from) {
    if constexpr (words == 2) {
      const uint2 loaded = *static_cast<const uint2*>(from);
      word[0] = loaded.x, word[1] = loaded.y;
    } else if constexpr (values_in_word<Element> == 4) {
      word[0] = *static_cast<const std::uint32_t*>(from);
    } else {
      word[0] = *static_cast<const std::uint16_t*>(from);
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

/// How packed rows of up to `Channels` 16-bit values lie in shared memory. Eight lanes that read the same 16 bytes of eight rows read from
/// all banks, so that none waits for another. Rows of at most 256 bytes are a power of two apart, and the order of their pieces of
/// 16 bytes is another one in each row; longer rows would take too much memory so, and are an odd number of 16 bytes apart.
template <int Channels>
struct row_places {
  static constexpr bool turned = Channels <= 128;

  /// Bytes from one row to the next one, for rows of up to `bytes`.
  static int stride(int bytes) {
    if constexpr (!turned) return ((bytes + 15) / 16 | 1) * 16;
    return std::max(16, int(std::bit_ceil(unsigned(bytes))));
  }
  /// Where row `i` begins.
  __device__ static __forceinline__ unsigned row(unsigned i, unsigned stride) {
    const unsigned in_banks = min(stride, 128u);
    return i * stride + (turned ? (i * in_banks >> 7) * 16 & (in_banks - 16) : 0);
  }
  /// A byte of the row that begins at `row`.
  __device__ static __forceinline__ unsigned byte(unsigned row, unsigned i) { return turned ? row ^ i : row + i; }
};

/// One row, whose values lie in shared memory, by one thread of a warp that does the same with other rows. Groups of `Group` channels that
/// stay are walked from the first one up and from the last one down in turns: neither has to wait for the other's bits.
///
/// visit.template operator()<Up>(place, base, words, j): the group has the values j to j + Group - 1 of `words`. Going up it is the
/// `place`th of its word of bits, going down the `place`th from the word's end; `base` began as `first` or `last` and went `Step` up
/// or down with each word.
template <class Places, packed_element Element, int Words, int Group, int Step>
class row_walk {
  static constexpr int in_word = values_in_word<Element>, value_bits = 32 / in_word;
  using four = four_values<Element>;

 public:
  /// `bits`: of the groups, the lowest of the first word is the first one's.
  template <int Most>
  __device__ __forceinline__ row_walk(const std::uint32_t (&bits)[Most], std::uint32_t first, std::uint32_t last) {
    static_assert(Words <= Most, "tessera: there are words for every group");
    up_.base = first, down_.base = last;
    // A word without a bit between two that have some: then words are looked at before every step, which is slow and rare.
    bool some = false, ended = false, gap = false;
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      up_.words[i] = __brev(bits[i]), down_.words[i] = bits[Words - 1 - i];
      const bool there = bits[i] != 0;
      gap = gap || (there && ended);
      ended = ended || (some && !there), some = some || there;
    }
    gaps_ = Words > 2 && __any_sync(~0u, gap);
    up_.drop_empty(), down_.drop_empty();
  }

  /// All `count` values of the row, which begins at `row` of `shared`.
  template <class Visit>
  __device__ __forceinline__ void walk(int count, const unsigned char* shared, unsigned row, const Visit& visit) {
    if (gaps_) return walk_slowly(0, count, shared, row, visit);
    // Eight values a round, four from each end. Rounds of sixteen are as many instructions, but warps wait longer for their code to come.
    int done = 0, end = count;
#pragma unroll 1
    while (end % 8 != 0) end -= Group, one<false>(end, shared, row, visit);
#pragma unroll 1
    for (; end > done; done += 4, end -= 4) {
      const four low = at(shared, row, done), high = at(shared, row, end - 4);
#pragma unroll
      for (int j = 0; j < 4; j += Group) {
        step<true>(low.word, j, visit);
        step<false>(high.word, 4 - Group - j, visit);
      }
    }
  }
  /// The next `count` values, of which only those are there; whatever came before went up, too.
  template <class Visit>
  __device__ __forceinline__ void walk_up(int count, const unsigned char* shared, unsigned row, const Visit& visit) {
    int done = 0;
#pragma unroll 1
    for (; !gaps_ && done + 4 <= count; done += 4) {
      const four some = at(shared, row, done);
#pragma unroll
      for (int j = 0; j < 4; j += Group) step<true>(some.word, j, visit);
    }
    walk_slowly(done, count, shared, row, visit);
  }

 private:
  __device__ static __forceinline__ four at(const unsigned char* shared, unsigned row, int i) {
    return four(shared + Places::byte(row, unsigned(i * value_bits / 8)));
  }
  template <bool Up, class Visit>
  __device__ __forceinline__ void step(const std::uint32_t* words, int j, const Visit& visit) {
    std::uint32_t base;
    const int place = Up ? up_.next(base) : down_.next(base);
    visit.template operator()<Up>(place, base, words, j);
  }
  /// The group whose first value is `i`.
  template <bool Up, class Visit>
  __device__ __forceinline__ void one(int i, const unsigned char* shared, unsigned row, const Visit& visit) {
    const auto word = [&](int w) {
      return *reinterpret_cast<const std::uint32_t*>(shared + Places::byte(row, unsigned(w * 4)));
    };
    std::uint32_t words[2] = {word(i / in_word) >> (i % in_word * value_bits), 0};
    if constexpr (Group * value_bits > 32) words[1] = word(i / in_word + 1);
    step<Up>(words, 0, visit);
  }
  template <class Visit>
  __device__ __forceinline__ void walk_slowly(int done, int count, const unsigned char* shared, unsigned row,
                                              const Visit& visit) {
#pragma unroll 1
    for (; done < count; done += Group) {
      up_.drop_empty();
      one<true>(done, shared, row, visit);
    }
  }

  bit_stream<Words, Step> up_;
  bit_stream<Words, -Step> down_;
  bool gaps_;
};

/// Words for the bits of every group of `Group` channels, at most `Channels`; and where a quarter of the channels is left out.
template <int Channels, int Group>
inline constexpr int group_words = (Channels + Group * 32 - 1) / (Group * 32);
template <int Channels>
inline constexpr int usual_words = group_words<Channels * 3 / 4, 1>;

/// Which of four walks goes along rows of a format: of single channels with the usual words or with all, of two, of four channels.
template <int Channels>
__device__ __forceinline__ int walk_of(const packed_format& format) {
  return format.group == 4 ? 3 : format.group == 2 ? 2 : bit_words(format) <= usual_words<Channels> ? 0 : 1;
}

/// Where the bits of a head's rows lie.
struct bit_rows {
  const std::uint32_t* bits;
  unsigned words, stride;  // of a row, and from one row to the next one
  __device__ __forceinline__ bit_rows(const packed_vectors& from, index_t head)
      : bits(from.bits_of(head, 0)),
        words(unsigned(bit_words(from.format))),
        stride(from.format.own_bits ? words : 0) {}

  /// Those of row `i`. Words that the format has not stay as they are.
  template <int Most>
  __device__ __forceinline__ void load(index_t i, std::uint32_t (&to)[Most]) const {
    const std::uint32_t* row = bits + std::uint64_t(unsigned(i)) * stride;
#pragma unroll
    for (unsigned w = 0; w < Most; ++w) {
      if (w < words) to[w] = row[w];
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
