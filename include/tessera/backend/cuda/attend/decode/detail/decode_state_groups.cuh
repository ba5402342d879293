// The softmax of one warp of the decode kernel over tiles of rows of code_group, whose codes are multiplied as fp16.
#pragma once

#include "decode_state.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Pairs of neighbouring halves' codes, as fp16: pair i has code i of the low half of `word`, and code i of the high
/// half. Exact: fp16 of 1024 + code * 2^shift, with the code's bits in the mantissa, less 1024, times 2^-shift.
template <int Bits>
__device__ __forceinline__ void decode_codes(std::uint32_t word, std::uint32_t (&pairs)[16 / Bits]) {
  constexpr std::uint32_t mask = (1u << Bits) - 1;
  const std::uint32_t upper = word >> 8;
#pragma unroll
  for (int i = 0; i < 16 / Bits; ++i) {
    const int shift = i * Bits % 8;
    const std::uint32_t biased = ((i * Bits < 8 ? word : upper) & ((mask | mask << 16) << shift)) | 0x64006400u;
    const __half2 above = reinterpret_cast<const __half2&>(biased);
    const __half2 codes = shift == 0
                              ? __hsub2(above, __float2half2_rn(1024.0f))
                              : __hfma2(above, __float2half2_rn(1.0f / float(1 << shift)),
                                        __float2half2_rn(-1024.0f / float(1 << shift)));
    pairs[i] = reinterpret_cast<const std::uint32_t&>(codes);
  }
}

/// The state of one warp, which reads tiles of groups of 64 elements: lowest + step * code. With keys, codes are
/// multiplied by queries, and the lane that has a token's logit adds lowest times the sum of the query's group. With
/// values, codes are multiplied by weights times steps, and one more product of weights and lowest numbers is added to
/// all of a group's channels.
///
/// Keys: a lane takes a word of a token at a time. Queries are loaded in the order in which decode_codes gives its
/// codes. Values: a lane takes eight channels of two neighbouring tokens, which are column lane / 4 of eight products.
template <class View>
struct decode_state_groups : decode_softmax<View::v_dim + 8, decode_config<View>::tokens> {
  using format = decode_format<View>;
  using T = typename View::element_type;
  using group = std::remove_const_t<typename format::stored_type>;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = decode_config<View>::tokens, bits = group::bits;
  static constexpr int k_row = format::k_rows.bytes(), v_row = format::v_rows.bytes(), bytes = int(sizeof(group));
  static constexpr int of_word = group::of_word, words = 64 / of_word / 4;  // of a key's group that a lane takes
  static constexpr int k_groups = D / 64, v_groups = Dv / 64;
  using base = decode_softmax<Dv + 8, tokens>;
  using base::out, base::max, base::sum;  // the last eight columns of `out`: sums of weights times lowest, by group

  /// Weights times steps, and so outputs, are divided by this power of two, at least the largest step so far.
  float unit = 0, inverse_unit = 0;

  struct queries {
    std::uint32_t q[D / 16][4];  // fp16
    float factor[2];             // that row lane / 4 + 8 * half has been divided by
    float sums[2][k_groups];     // of the row's elements in a group, divided alike

    __device__ void load(int half, const T* from, int lane) {
      std::uint32_t pairs[D / 32][4];  // elements of the lane's words
#pragma unroll
      for (int w = 0; w < k_groups * words; ++w) {
        const T* const at = from + w / words * 64 + (w % words * 4 + lane % 4) * of_word;
#pragma unroll
        for (int part = 0; part < of_word / 8; ++part) {
          const uint4 eight = from ? *reinterpret_cast<const uint4*>(at + part * 8) : uint4{};
          const int i = w * of_word / 8 + part;
          pairs[i][0] = eight.x, pairs[i][1] = eight.y, pairs[i][2] = eight.z, pairs[i][3] = eight.w;
        }
      }
      float up = 1;
      factor[half] = 1;
      if constexpr (std::is_same_v<T, bf16>) {
        // fp16 has more digits than bf16 but a shorter range: the row is scaled so that its largest element is near
        // 2^8.
        std::uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          const std::uint32_t two = pairs[i / 4][i % 4];
          largest = umax(largest, umax(two & 0x7fff0000u, two << 16 & 0x7fff0000u));
        }
        largest = umax(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = umax(largest, __shfl_xor_sync(~0u, largest, 2));
        const std::uint32_t exponent = umin(262u - (largest >> 23), 253u);
        up = __uint_as_float(exponent << 23);
        factor[half] = __uint_as_float((254u - exponent) << 23);
      }
      const auto element = [&](int i) {
        const std::uint32_t two = pairs[i / 8][i / 2 % 4];
        return float(bits_as<T>(static_cast<std::uint16_t>(i % 2 ? two >> 16 : two))) * up;
      };
#pragma unroll
      for (int g = 0; g < k_groups; ++g) sums[half][g] = 0;
#pragma unroll
      for (int w = 0; w < k_groups * words; ++w) {
#pragma unroll
        for (int i = 0; i < of_word / 2; ++i) {  // pair i: codes i and i + of_word / 2
          const float first = element(w * of_word + i), second = element(w * of_word + i + of_word / 2);
          q[w * (of_word / 4) + i / 2][i % 2 * 2 + half] = pack_pair<fp16>(first, second);
          sums[half][w / words] += rounded(first) + rounded(second);
        }
      }
#pragma unroll
      for (int g = 0; g < k_groups; ++g) sums[half][g] = lanes_sum<4>(sums[half][g]);
    }
    __device__ static float rounded(float x) { return std::is_same_v<T, fp16> ? x : float(fp16(x)); }
  };

  /// As decode_state's.
  template <class LogitOf>
  __device__ void read(const queries& asked, std::uint32_t shared, bool plain, bool masked, float scale2,
                       const LogitOf& logit_of, int lane) {
    const std::uint32_t values = shared + std::uint32_t(tokens * k_row);
    float s[tokens / 8][4] = {};
#pragma unroll
    for (int g = 0; g < k_groups; ++g) multiply_group(asked, g, shared + std::uint32_t(g * bytes), s, lane);
    const float factors[2] = {asked.factor[0] * (plain ? scale2 : 1.0f), asked.factor[1] * (plain ? scale2 : 1.0f)};
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= factors[i / 2];
    }
    if (!plain) {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = logit_of(n * 8 + lane % 4 * 2 + i % 2, i / 2, s[n][i]);
      }
    }
    base::weigh(s);
    multiply_values(s, values, masked, lane);
  }

  /// As decode_state's.
  __device__ void store(float* outs, float2* states, int used, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + half * 8;
#pragma unroll
      for (int g = 0; g < v_groups; ++g) {
        // Lane g / 2 of the four has the group's sum of lowest numbers.
        const float lowest = __shfl_sync(~0u, out[Dv / 8][half * 2 + g % 2], lane / 4 * 4 + g / 2);
        if (r >= used) continue;
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
          const auto at = [&](int c) { return fmaf(out[g * 8 + c % 8][half * 2 + c / 8], unit, lowest); };
          *reinterpret_cast<float4*>(outs + r * merge_pitch(Dv) + g * 64 + lane % 4 * 16 + i) =
              make_float4(at(i), at(i + 1), at(i + 2), at(i + 3));
        }
      }
      if (r < used && lane % 4 == 0) states[r] = make_float2(max[half], sum[half]);
    }
  }

 private:
  __device__ static std::uint32_t word_at(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
  /// A group's lowest number and its step.
  __device__ static float2 ends_of(std::uint32_t word) { return __half22float2(reinterpret_cast<const __half2&>(word)); }

  /// Adds the products of the queries and the tile's keys in one group. Loads come first, and then products of
  /// independent tokens side by side: neither waits for the one before it.
  __device__ static void multiply_group(const queries& asked, int g, std::uint32_t keys, float (&s)[tokens / 8][4],
                                        int lane) {
    std::uint32_t codes[tokens / 8][words], ends[tokens / 8][2];
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
      const std::uint32_t at = keys + std::uint32_t(n * 8 * k_row);
#pragma unroll
      for (int w = 0; w < words; ++w)
        codes[n][w] = word_at(at + std::uint32_t(lane / 4 * k_row + 4 + w * 16 + lane % 4 * 4));
#pragma unroll
      for (int i = 0; i < 2; ++i) ends[n][i] = word_at(at + std::uint32_t((lane % 4 * 2 + i) * k_row));
    }
    float part[tokens / 8][4] = {};
#pragma unroll
    for (int w = 0; w < words; ++w) {
      std::uint32_t pairs[tokens / 8][16 / bits];
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) decode_codes<bits>(codes[n][w], pairs[n]);
#pragma unroll
      for (int i = 0; i < 8 / bits; ++i) {
#pragma unroll
        for (int n = 0; n < tokens / 8; ++n)
          multiply<fp16>(part[n], asked.q[(g * words + w) * (of_word / 4) + i], pairs[n][i * 2], pairs[n][i * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 own = ends_of(ends[n][i % 2]);
        s[n][i] = fmaf(own.y, part[n][i], fmaf(own.x, asked.sums[i / 2][g], s[n][i]));
      }
    }
  }

  /// Makes `unit` large enough for the tile's steps.
  __device__ void follow(float largest) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (!(largest > unit)) return;
    const std::uint32_t exponent = umin((__float_as_uint(largest) >> 23) + 1, 253u);
    const float shrink = unit * __uint_as_float((254u - exponent) << 23);
    unit = __uint_as_float(exponent << 23);
    inverse_unit = __uint_as_float((254u - exponent) << 23);
#pragma unroll
    for (int n = 0; n < Dv / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= shrink;
    }
  }

  /// Eight channels of a token's group, column lane / 4: 32 bits of codes of 4, 16 of codes of 2.
  __device__ static std::uint32_t eight_codes(std::uint32_t address) {
    if constexpr (bits == 4) {
      return word_at(address);
    } else {
      std::uint16_t half;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
      return half;
    }
  }
  /// Channels of two neighbouring tokens: pair i has channel part * pairs + i of both.
  __device__ static void pair_codes(std::uint32_t first, std::uint32_t second, int part,
                                    std::uint32_t (&pairs)[16 / bits]) {
    decode_codes<bits>(__byte_perm(first, second, part ? 0x7632 : 0x5410), pairs);
  }

  __device__ void multiply_values(const float (&s)[tokens / 8][4], std::uint32_t values, bool masked, int lane) {
    constexpr int parts = bits / 2;  // of eight channels
    std::uint32_t ends[tokens / 4][v_groups];
    float largest = 0;
#pragma unroll
    for (int t = 0; t < tokens / 4; ++t) {  // the lane's: 2 (lane % 4), the next one, and so on by eights
#pragma unroll
      for (int g = 0; g < v_groups; ++g)
        ends[t][g] = word_at(values + std::uint32_t((t / 2 * 8 + lane % 4 * 2 + t % 2) * v_row + g * bytes));
    }
#pragma unroll
    for (int t = 0; t < tokens / 4; ++t) {
#pragma unroll
      for (int g = 0; g < v_groups; ++g) largest = fmaxf(largest, ends_of(ends[t][g]).y);
    }
    follow(largest);
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) {
      const float(&low)[4] = s[k * 2], (&high)[4] = s[k * 2 + 1];
      std::uint32_t codes[v_groups][4];  // of tokens 2, 2 + 1, 2 + 8 and 2 + 9 of sixteen
#pragma unroll
      for (int g = 0; g < v_groups; ++g) {
        const std::uint32_t at =
            values + std::uint32_t((k * 16 + lane % 4 * 2) * v_row + g * bytes + 4 + lane / 4 * bits);
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[g][i] = eight_codes(at + std::uint32_t((i / 2 * 8 + i % 2) * v_row));
      }
      std::uint32_t weights[4], lowest[2] = {};
      pack_weights<fp16>(low, high, weights);
#pragma unroll
      for (int g = 0; g < v_groups; ++g) {
        float own[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // 0 * NaN: a token that a row does not see adds nothing to it.
          const auto weigh = [&](float weight, std::uint32_t of) {
            return masked && weight == 0 ? 0.0f : weight * (ends_of(of).y * inverse_unit);
          };
          own[0][i] = weigh(low[i], ends[k * 4 + i % 2][g]), own[1][i] = weigh(high[i], ends[k * 4 + 2 + i % 2][g]);
        }
        std::uint32_t scaled[4];
        pack_weights<fp16>(own[0], own[1], scaled);
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          std::uint32_t near[16 / bits], far[16 / bits];
          pair_codes(codes[g][0], codes[g][1], part, near);
          pair_codes(codes[g][2], codes[g][3], part, far);
#pragma unroll
          for (int i = 0; i < 16 / bits; ++i)
            multiply<fp16>(out[g * 8 + part * (16 / bits) + i], scaled, near[i], far[i]);
        }
        if (lane / 4 == g) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            lowest[i] = finite(__byte_perm(ends[k * 4 + i * 2][g], ends[k * 4 + i * 2 + 1][g], 0x5410));
        }
      }
      multiply<fp16>(out[Dv / 8], weights, lowest[0], lowest[1]);
    }
  }
  /// Two halves, NaN as 0: a NaN group shows by its step, and must not spoil rows that do not see it.
  __device__ static std::uint32_t finite(std::uint32_t two) {
    const std::uint32_t nan = __vcmpgtu2(two & 0x7fff7fffu, 0x7c007c00u);
    return two & ~nan;
  }
};

/// The state that reads a view's tiles.
template <class View>
struct decode_state_of {
  using format = decode_format<View>;
  static constexpr auto made() {
    if constexpr (format::groups) {
      return std::type_identity<decode_state_groups<View>>{};
    } else if constexpr (format::bytes) {
      return std::type_identity<decode_state_bytes<View>>{};
    } else {
      return std::type_identity<decode_state<View>>{};
    }
  }
  using type = typename decltype(made())::type;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
