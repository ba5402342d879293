// One vector becomes a packed row: its strongest channels, their bits and, where the format has one, a scale; by a
// thread or by a warp.
#pragma once

#include <cuda_bf16.h>

#include "../../../../../channels/top_groups.hpp"
#include "../../../../../math/ordered.hpp"
#include "../packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Which groups of one vector's channels stay, chosen by one warp, or by one thread.

namespace detail {

inline constexpr int max_group_words = largest_head_dim / 32;

/// chosen = bits of the `wanted` of `groups` groups of `group` channels of `row` with most energy, alike in all lanes;
/// ties to the lower group, NaN last.
template <int Words>
__device__ __forceinline__ void choose_groups(const float* row, int groups, int group, int wanted,
                                              std::uint32_t (&chosen)[Words]) {
  constexpr int most = Words;
  const int lane = int(threadIdx.x) % 32;
  std::uint32_t keys[most];
#pragma unroll
  for (int j = 0; j < most; ++j) {
    const int g = j * 32 + lane;
    float energy = 0;
    if (g < groups) {
#pragma unroll 1
      for (int c = g * group; c < (g + 1) * group; ++c) energy = __fadd_rn(energy, __fmul_rn(row[c], row[c]));
    }
    keys[j] = g < groups ? ordered_bits(energy) : 0u;  // 0: below every key
  }
  // The wanted-th largest key, two bits at a time; of those that equal it the lower groups stay.
  std::uint32_t least = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 0; bit -= 2) {
    const std::uint32_t unit = 1u << bit;
    int reaching[3] = {};
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j * 32 >= groups) continue;
#pragma unroll
      for (int k = 0; k < 3; ++k) reaching[k] += __popc(__ballot_sync(~0u, keys[j] >= least + unit * (k + 1)));
    }
    const int up = (reaching[0] >= wanted) + (reaching[1] >= wanted) + (reaching[2] >= wanted);
    least += unit * up;
    if (reaching[0] == wanted || reaching[1] == wanted || reaching[2] == wanted) break;
  }
  int above = 0;
#pragma unroll
  for (int j = 0; j < most; ++j) {
    if (j * 32 < groups) above += __popc(__ballot_sync(~0u, keys[j] > least));
  }
  int ties = wanted - above;
#pragma unroll
  for (int j = 0; j < most; ++j) {
    chosen[j] = 0;
    if (j * 32 >= groups) continue;
    const std::uint32_t equal = __ballot_sync(~0u, keys[j] == least && j * 32 + lane < groups);
    const bool stays = keys[j] > least || (((equal >> lane) & 1u) && __popc(equal & ((1u << lane) - 1u)) < ties);
    chosen[j] = __ballot_sync(~0u, stays);
    ties = (max)(0, ties - __popc(equal));
  }
}

/// The same choice, by one thread: of vectors of up to `Dim` channels in shared memory.
///
/// Energies are compared in pairs, by their upper 16 bits; only those that equal the last one that stays are told apart
/// by all of their bits.
template <int Dim>
class thread_choice {
  static constexpr int pairs = Dim / 2, none = -1;  // none: NaN, which ranks last

 public:
  static constexpr int words = (Dim + 31) / 32;

  /// `group`: 1, 2 or 4.
  __device__ thread_choice(const float* row, int groups, int group) : row_(row), groups_(groups), group_(group) {
    if (group == 1)
      fill_keys<1>();
    else if (group == 2)
      fill_keys<2>();
    else
      fill_keys<4>();
  }

  /// chosen = bits of the `wanted` groups that stay; at most as many as there are.
  __device__ void choose(int wanted, std::uint32_t (&chosen)[words]) const {
    const int most = largest();
    int least = none, above = most + 1;  // at least `wanted` groups reach `least`, fewer reach `above`
    for (int trial = most - (16 << 7); above - least > 1; trial = (least + above) / 2) {
      if (trial <= least) continue;
      const int reaching = count(trial);
      if (reaching < wanted) {
        above = trial;
      } else {
        least = trial;
        if (reaching == wanted) break;
      }
    }
    const int sure = above - least > 1 ? least : above;  // all that reach it stay
    bits_from(sure, chosen);
    int left = wanted;
#pragma unroll
    for (int j = 0; j < words; ++j) left -= __popc(chosen[j]);
    if (left > 0) add_best(least, left, chosen);
  }

 private:
  /// The upper halves of energies, which are not negative; of NaN -1, behind the last group -2.
  template <int Group>
  __device__ void fill_keys() {
    const auto key_of = [&](int g) {
      const float e = g < groups_ ? energy<Group>(g) : -2.0f;
      return __float_as_uint(e == e ? e : -1.0f);
    };
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      if (i % 8 == 0 && i * 2 >= groups_) break;
      keys_[i] = __byte_perm(key_of(i * 2), key_of(i * 2 + 1), 0x7632);
    }
  }
  template <int Group>
  __device__ float energy(int g) const {
    float sum = 0;
#pragma unroll
    for (int c = g * Group; c < (g + 1) * Group; ++c) sum = __fadd_rn(sum, __fmul_rn(row_[c], row_[c]));
    return sum;
  }
  __device__ float energy(int g) const {
    return group_ == 1 ? energy<1>(g) : group_ == 2 ? energy<2>(g) : energy<4>(g);
  }
  /// A key to compare with, twice.
  __device__ static __nv_bfloat162 both(int code) {
    const std::uint32_t key = code == none ? 0xbf80u : std::uint32_t(code), word = key | key << 16;
    return reinterpret_cast<const __nv_bfloat162&>(word);
  }
  __device__ __nv_bfloat162 pair(int i) const { return reinterpret_cast<const __nv_bfloat162&>(keys_[i]); }

  __device__ int largest() const {
    __nv_bfloat162 most = both(none);
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      if (i % 8 == 0 && i * 2 >= groups_) break;
      most = __hmax2(most, pair(i));
    }
    return __float_as_int(fmaxf(fmaxf(__low2float(most), __high2float(most)), 0.0f)) >> 16;
  }
  __device__ int count(int code) const {
    const __nv_bfloat162 least = both(code);
    __nv_bfloat162 sums[4] = {both(0), both(0), both(0), both(0)};  // counts are exact up to 256
#pragma unroll
    for (int i = 0; i < pairs; ++i) {
      if (i % 8 == 0 && i * 2 >= groups_) break;
      sums[i % 4] = __hadd2(sums[i % 4], __hge2(pair(i), least));
    }
    const float2 sum = __bfloat1622float2(__hadd2(__hadd2(sums[0], sums[1]), __hadd2(sums[2], sums[3])));
    return int(sum.x + sum.y);
  }
  /// bits of the groups that reach a key.
  __device__ void bits_from(int code, std::uint32_t (&bits)[words]) const {
    const __nv_bfloat162 least = both(code);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      bits[j] = 0;
      if (j * 16 >= pairs || j * 32 >= groups_) continue;
#pragma unroll
      for (int i = 0; i < 16 && j * 16 + i < pairs; ++i) {
        if (i % 8 == 0 && (j * 16 + i) * 2 >= groups_) break;
        const std::uint32_t two = __hge2_mask(pair(j * 16 + i), least) & 0x00020001u;
        bits[j] |= ((two | two >> 16) & 3u) << (i * 2);
      }
    }
  }
  /// The `left` best of the groups whose key is `code`; ties to the lower one.
  __device__ void add_best(int code, int left, std::uint32_t (&chosen)[words]) const {
    std::uint32_t equal[words];
    bits_from(code, equal);
#pragma unroll
    for (int j = 0; j < words; ++j) equal[j] &= ~chosen[j];
    for (; left > 0; --left) {
      int best = -1;
      float most = 0;
#pragma unroll
      for (int j = 0; j < words; ++j) {
        for (std::uint32_t rest = equal[j]; rest; rest &= rest - 1) {
          const int g = j * 32 + __ffs(int(rest)) - 1;
          const float e = energy(g);
          if (best < 0 || e > most) best = g, most = e;
        }
      }
#pragma unroll
      for (int j = 0; j < words; ++j) {
        const std::uint32_t taken = best / 32 == j ? 1u << (best % 32) : 0u;
        chosen[j] |= taken, equal[j] &= ~taken;
      }
    }
  }

  const float* row_;
  int groups_, group_;
  std::uint32_t keys_[pairs];
};

/// Values as they are written, `bits` each.
template <packed_element Element>
struct written {
  static constexpr int bits = Element == packed_element::fp8 ? 8 : Element == packed_element::int4 ? 4 : 16;
  __device__ static std::uint32_t code(float x, float scale) {
    if constexpr (Element == packed_element::fp16) {
      return __half_as_ushort(__float2half_rn(tessera::detail::clamped_to_fp16(x)));
    } else if constexpr (Element == packed_element::fp8) {
      return fp8(x / scale).bits;
    } else if constexpr (Element == packed_element::int4) {
      std::byte nibble{};
      tessera::detail::store_int4(&nibble, 0, x / scale);
      return std::uint32_t(nibble) & 15u;
    } else {
      return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
  }
};

/// The channels of the groups that stay, ascending.
template <int Words>
class kept_channels {
 public:
  __device__ __forceinline__ kept_channels(const std::uint32_t (&chosen)[Words], int group) : group_(group) {
#pragma unroll
    for (int j = 0; j < Words; ++j) groups_.words[j] = __brev(chosen[j]);
    groups_.position = 0;
  }
  /// Not after the last one.
  __device__ __forceinline__ int next() {
    if (left_ == 0) {
      groups_.drop_empty();
      channel_ = int(groups_.template next<0>()) * group_, left_ = group_;
      groups_.count(1);
    }
    --left_;
    return channel_++;
  }

 private:
  bit_stream<Words, 1> groups_;
  int group_, channel_ = 0, left_ = 0;
};

/// Writes the `kept` channels of a row that `walk` gives: 16 bytes at a time, or 4 where each value is divided.
template <packed_element Element, int Words>
__device__ void write_values(kept_channels<Words> walk, int kept, const float* row, float scale, std::byte* to) {
  constexpr int bits = written<Element>::bits, in_word = 32 / bits, words = bits == 16 ? 4 : 1;
#pragma unroll 1
  for (int first = 0; first < kept; first += words * in_word) {
    std::uint32_t made[words];
#pragma unroll
    for (int w = 0; w < words; ++w) {
      made[w] = 0;
#pragma unroll(bits == 16 ? 2 : 1)
      for (int e = 0; e < in_word; ++e) {
        if (first + w * in_word + e >= kept) break;
        made[w] |= written<Element>::code(row[walk.next()], scale) << (e * bits);
      }
    }
    if constexpr (words == 4)
      *reinterpret_cast<uint4*>(to + first * 2) = make_uint4(made[0], made[1], made[2], made[3]);
    else
      *reinterpret_cast<std::uint32_t*>(to + first * bits / 8) = made[0];
  }
}

/// Of a vector whose largest size is `largest`: as pack_row's.
__device__ inline float fitted_scale(packed_element element, float largest) {
  const float fitted = largest / (element == packed_element::fp8 ? 448.0f : 7.0f);
  return fitted > 1e-30f ? fitted : 1.0f;
}
/// Packs one vector, `row` in shared memory, as the row at an address. By one thread; the vectors of all threads have
/// one format.
template <int D>
__device__ void pack_vector(const packed_format& format, const packed_vectors& to, index_t head,
                            const packed_row_address& at, const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int kept = int(format.stored_channels);
  std::uint32_t chosen[words];
  if (format.own_bits) {
    thread_choice<D>(row, int(format.groups()), int(format.group)).choose(kept / int(format.group), chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (j < bit_words(format)) to.own_bits_of(head, at)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.set_of(head);
#pragma unroll
    for (int j = 0; j < words; ++j) chosen[j] = j < bit_words(format) ? set[j] : 0u;
  }
  const kept_channels<words> walk(chosen, int(format.group));
  float scale = 1;
  if (format.scaled()) {
    float largest = 0;
    kept_channels<words> again = walk;
    for (int e = 0; e < kept; ++e) {
      const float x = fabsf(row[again.next()]);
      if (x < infinity) largest = fmaxf(largest, x);
    }
    scale = fitted_scale(format.element, largest);
    to.scale_of(head, at) = scale;
  }
  with_element(format.element, [&]<packed_element Element>() {
    write_values<Element>(walk, kept, row, scale, to.values_of(head, at));
  });
}

/// As `pack_vector`, by a warp, a lane every 32nd group: the latency of one row is less, the work of many is more.
template <int D>
__device__ void pack_vector_by_warp(const packed_format& format, const packed_vectors& to, index_t head,
                                    const packed_row_address& at, const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int group = int(format.group), lane = int(threadIdx.x) % 32;
  std::uint32_t chosen[words] = {};
  if (format.own_bits) {
    choose_groups(row, int(format.groups()), group, int(format.stored_channels) / group, chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (lane == j && j < bit_words(format)) to.own_bits_of(head, at)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.set_of(head);
#pragma unroll
    for (int j = 0; j < words; ++j) chosen[j] = j < bit_words(format) ? set[j] : 0u;
  }
  // Calls for the channels of this lane that stay, with each one's place among the values.
  const auto for_each_stored = [&](const auto& call) {
    int before = 0;
#pragma unroll
    for (int j = 0; j < words; ++j) {
      const int place = (before + __popc(chosen[j] & ((1u << lane) - 1u))) * group, from = (j * 32 + lane) * group;
#pragma unroll 1
      for (int c = 0; (chosen[j] >> lane & 1u) && c < group; ++c) call(from + c, place + c);
      before += __popc(chosen[j]);
    }
  };
  float scale = 1;
  if (format.scaled()) {
    float largest = 0;
    for_each_stored([&](int c, int) {
      const float x = fabsf(row[c]);
      if (x < infinity) largest = fmaxf(largest, x);
    });
    scale = fitted_scale(format.element, lanes_max<32>(largest));
    if (lane == 0) to.scale_of(head, at) = scale;
  }
  with_element(format.element, [&]<packed_element Element>() {
    constexpr int bits = written<Element>::bits, in_word = 32 / bits;
    std::byte* values = to.values_of(head, at);
    if constexpr (bits == 4) {
#pragma unroll 1
      for (int first = 0; first < int(format.stored_channels); first += in_word) {
        std::uint32_t mine = 0;
        for_each_stored([&](int c, int e) {
          if (e / in_word == first / in_word) mine |= written<Element>::code(row[c], scale) << e % in_word * bits;
        });
        mine = __reduce_or_sync(~0u, mine);
        if (lane == 0) *reinterpret_cast<std::uint32_t*>(values + first / 2) = mine;
      }
    } else {
      using stored = std::conditional_t<bits == 8, std::uint8_t, std::uint16_t>;
      const int kept = int(format.stored_channels), padded = bits == 8 ? in_word : 8,
                end = ceil_div(kept, padded) * padded;
      auto* codes = reinterpret_cast<stored*>(values);
      for_each_stored([&](int c, int e) { codes[e] = stored(written<Element>::code(row[c], scale)); });
      if (kept + lane < end) codes[kept + lane] = 0;
    }
  });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
