// One vector becomes a packed row: its strongest channels, their bits and, where the format has one, a scale; by a
// thread or by a warp.
#pragma once

#include "../../../../channels/top_groups.hpp"
#include "choose_groups.cuh"
#include "walk_row.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Values as they are written, `bits` each.
template <packed_element Element>
struct written {
  static constexpr int bits = Element == packed_element::fp8 ? 8 : Element == packed_element::int4 ? 4 : 16;
  __device__ static std::uint32_t code(float x, float scale) {
    if constexpr (Element == packed_element::fp16) {
      return __half_as_ushort(__float2half_rn(tessera::detail::held_by_fp16(x)));
    } else if constexpr (Element == packed_element::fp8) {
      return fp8(x / scale).bits;
    } else if constexpr (Element == packed_element::int4) {
      std::byte nibble{};
      tessera::detail::put_int4(&nibble, 0, x / scale);
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
    groups_.at = 0;
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
/// Packs one vector, `row` in shared memory, as row i of a plane. By one thread; all threads' planes have one format.
template <int D>
__device__ void pack_vector(const packed_format& format, const packed_vectors& to, index_t head, index_t i,
                            const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int kept = int(format.kept);
  std::uint32_t chosen[words];
  if (format.own_bits) {
    thread_choice<D>(row, int(format.groups()), int(format.group)).choose(kept / int(format.group), chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (j < bit_words(format)) to.own_bits_of(head, i)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.bits_of(head, i);
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
    to.scales[to.row(head, i)] = scale;
  }
  with_element(format.element,
               [&]<packed_element Element>() { write_values<Element>(walk, kept, row, scale, to.values_of(head, i)); });
}

/// As `pack_vector`, by a warp, a lane every 32nd group: the latency of one row is less, the work of many is more.
template <int D>
__device__ void pack_vector_by_warp(const packed_format& format, const packed_vectors& to, index_t head, index_t i,
                                    const float* row) {
  constexpr int words = thread_choice<D>::words;
  const int group = int(format.group), lane = int(threadIdx.x) % 32;
  std::uint32_t chosen[words] = {};
  if (format.own_bits) {
    choose_groups(row, int(format.groups()), group, int(format.kept) / group, chosen);
#pragma unroll
    for (int j = 0; j < words; ++j) {
      if (lane == j && j < bit_words(format)) to.own_bits_of(head, i)[j] = chosen[j];
    }
  } else {
    const std::uint32_t* set = to.bits_of(head, i);
#pragma unroll
    for (int j = 0; j < words; ++j) chosen[j] = j < bit_words(format) ? set[j] : 0u;
  }
  // Calls for the channels of this lane that stay, with each one's place among the values.
  const auto for_each_kept = [&](const auto& call) {
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
    for_each_kept([&](int c, int) {
      const float x = fabsf(row[c]);
      if (x < infinity) largest = fmaxf(largest, x);
    });
    scale = fitted_scale(format.element, lanes_max<32>(largest));
    if (lane == 0) to.scales[to.row(head, i)] = scale;
  }
  with_element(format.element, [&]<packed_element Element>() {
    constexpr int bits = written<Element>::bits, in_word = 32 / bits;
    std::byte* values = to.values_of(head, i);
    if constexpr (bits == 4) {
#pragma unroll 1
      for (int first = 0; first < int(format.kept); first += in_word) {
        std::uint32_t mine = 0;
        for_each_kept([&](int c, int e) {
          if (e / in_word == first / in_word) mine |= written<Element>::code(row[c], scale) << e % in_word * bits;
        });
        mine = __reduce_or_sync(~0u, mine);
        if (lane == 0) *reinterpret_cast<std::uint32_t*>(values + first / 2) = mine;
      }
    } else {
      using stored = std::conditional_t<bits == 8, std::uint8_t, std::uint16_t>;
      const int kept = int(format.kept), padded = bits == 8 ? in_word : 8, end = ceil_div(kept, padded) * padded;
      auto* codes = reinterpret_cast<stored*>(values);
      for_each_kept([&](int c, int e) { codes[e] = stored(written<Element>::code(row[c], scale)); });
      if (kept + lane < end) codes[kept + lane] = 0;
    }
  });
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
