// The softmax of one warp of the decode kernel over tiles of rows of code_group, whose codes are multiplied as fp16.
#pragma once

#include "decode_state.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// By how many bits the i-th pair's codes are higher than its halves' lowest bit.
template <int Bits>
TESSERA_HD constexpr int code_shift(int i) {
  return i * Bits % 8;
}
/// Codes of a word as pairs of fp16: pair i has code i of the low half, and code i of the high half. The bits of a code
/// are those of a subnormal number, code * 2^(code_shift - 24), exactly. Whoever multiplies them makes up for the
/// power.
template <int Bits>
__device__ __forceinline__ void pair_codes(std::uint32_t word, std::uint32_t (&pairs)[16 / Bits]) {
  constexpr std::uint32_t mask = (1u << Bits) - 1;
  const std::uint32_t upper = word >> 8;
#pragma unroll
  for (int i = 0; i < 16 / Bits; ++i)
    pairs[i] = (i * Bits < 8 ? word : upper) & ((mask | mask << 16) << code_shift<Bits>(i));
}

/// The state of one warp, which reads tiles of groups of 64 elements: lowest + step * code. With keys, codes are
/// multiplied by queries, and lowest times the sum of the query's group is added. With values, codes are multiplied by
/// weights times steps, and the sum of weights times lowest is added to all of a group's channels.
///
/// Codes are the left side of products, and queries and weights the right side: eight query rows take half of the
/// registers and products that sixteen would. A lane has logits of tokens lane / 4 and lane / 4 + 8 of sixteen, and of
/// rows 2 (lane % 4) and the next one. Keys: a lane takes a word of each of its tokens, and queries are loaded in the
/// order in which pair_codes gives its codes. Values: a lane takes eight neighbouring channels of two neighbouring
/// tokens, which are rows lane / 4 and lane / 4 + 8 of four products.
template <class View>
struct decode_state_groups {
  using format = decode_format<View>;
  using T = typename View::element_type;
  using group = std::remove_const_t<typename format::stored_type>;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = decode_config<View>::tokens, bits = group::bits;
  static constexpr int k_row = format::k_rows.bytes(), v_row = format::v_rows.bytes(), bytes = int(sizeof(group));
  static constexpr int of_word = group::of_word, words = 64 / of_word / 4;  // of a key's group that a lane takes
  static constexpr int k_groups = D / 64, v_groups = Dv / 64, sixteens = tokens / 16;

  float out[Dv / 16][4] = {};             // four products a group: of two channels by two rows
  float lowest[v_groups][2] = {};         // weights times lowest, of the lane's tokens
  float max[2] = {-infinity, -infinity};  // of the lane's rows, base 2
  float sum[2] = {};                      // of the lane's tokens
  /// Weights times steps, and so outputs, are divided by this power of two, at least the largest step so far.
  float unit = 0, inverse_unit = 0;

  struct queries {
    std::uint32_t q[D / 16][2];  // fp16, of row lane / 4
    float factor[2];             // of the products of the lane's rows and codes
    float sums[2][k_groups];     // of the elements of the lane's rows in a group, divided by that factor

    /// Row lane / 4 lies at `from`; null: zeros.
    __device__ void load(int, const T* from, int lane) {
      std::uint32_t pairs[D / 32][4];  // elements of the lane's words
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const int w = i * 8 / of_word, part = i * 8 % of_word;
        const T* const at = from + w / words * 64 + (w % words * 4 + lane % 4) * of_word + part;
        const uint4 eight = from ? *reinterpret_cast<const uint4*>(at) : uint4{};
        pairs[i][0] = eight.x, pairs[i][1] = eight.y, pairs[i][2] = eight.z, pairs[i][3] = eight.w;
      }
      float up = 1, down = 1;
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
        up = __uint_as_float(exponent << 23), down = __uint_as_float((254u - exponent) << 23);
      }
      const auto element = [&](int i) {
        const std::uint32_t two = pairs[i / 8][i / 2 % 4];
        const float x = float(bits_as<T>(static_cast<std::uint16_t>(i % 2 ? two >> 16 : two))) * up;
        return std::is_same_v<T, fp16> ? x : float(fp16(x));
      };
      float own[k_groups] = {};
#pragma unroll
      for (int w = 0; w < k_groups * words; ++w) {
#pragma unroll
        for (int i = 0; i < of_word / 2; ++i) {  // pair i: codes i and i + of_word / 2
          const float first = element(w * of_word + i), second = element(w * of_word + i + of_word / 2);
          constexpr float of_shift[] = {1.0f, 1.0f / 4, 1.0f / 16, 1.0f / 64};
          const float by = of_shift[code_shift<bits>(i) / 2];
          q[w * (of_word / 4) + i / 2][i % 2] = pack_pair<fp16>(first * by, second * by);
          own[w / words] += first + second;
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int owner = (lane % 4 * 2 + j) * 4;
        factor[j] = __shfl_sync(~0u, down, owner) * 0x1p24f;
#pragma unroll
        for (int g = 0; g < k_groups; ++g) {
          if (j == 0) own[g] = lanes_sum<4>(own[g]);
          sums[j][g] = __shfl_sync(~0u, own[g], owner) * 0x1p-24f;
        }
      }
    }
  };

  /// As decode_state's.
  template <class LogitOf>
  __device__ void read(const queries& asked, std::uint32_t shared, bool plain, bool masked, float scale2,
                       const LogitOf& logit_of, int lane) {
    float s[sixteens][4];  // rows 0 and 1 of the lane's first token, and of its second one
    multiply_keys(asked, shared, s, lane);
    const float factors[2] = {asked.factor[0] * (plain ? scale2 : 1.0f), asked.factor[1] * (plain ? scale2 : 1.0f)};
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] *= factors[i % 2];
    }
    if (!plain) {
#pragma unroll
      for (int m = 0; m < sixteens; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][i] = logit_of(m * 16 + i / 2 * 8 + lane / 4, lane % 4 * 2 + i % 2, s[m][i]);
      }
    }
    weigh(s);
    multiply_values(s, shared + std::uint32_t(tokens * k_row), masked, lane);
  }

  /// Adds the lanes' shares of every row's sums.
  __device__ void close() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sum[j] = across(sum[j], [](float a, float b) { return a + b; });
#pragma unroll
      for (int g = 0; g < v_groups; ++g) lowest[g][j] = across(lowest[g][j], [](float a, float b) { return a + b; });
    }
  }

  /// As decode_state's.
  __device__ void store(float* outs, float2* states, int used, int lane) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = lane % 4 * 2 + j;
      if (r >= used) continue;
#pragma unroll
      for (int i = 0; i < Dv / 16; i += 2) {
        float four[4];  // channels 2 i to 2 i + 3 of the lane's eight
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float by = 0x1p24f / float(1 << code_shift<bits>((i * 2 + c) % 8 % (16 / bits)));
          four[c] = fmaf(out[i + c / 2][c % 2 * 2 + j] * by, unit, lowest[i / 4][j]);
        }
        *reinterpret_cast<float4*>(outs + r * merge_pitch(Dv) + i / 4 * 64 + lane / 4 * 8 + i % 4 * 2) =
            make_float4(four[0], four[1], four[2], four[3]);
      }
      if (lane / 4 == 0) states[r] = make_float2(max[j], sum[j]);
    }
  }

 private:
  __device__ static std::uint32_t word_at(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
  /// A group's lowest number and its step.
  __device__ static float2 ends_of(std::uint32_t word) {
    return __half22float2(reinterpret_cast<const __half2&>(word));
  }
  /// Joins what the lanes of a row have.
  template <class Join>
  __device__ static float across(float x, const Join& join) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }

  /// Products of the tile's keys and the queries. Loads come first, and then products of independent tokens and groups
  /// side by side: neither waits for the one before it.
  __device__ static void multiply_keys(const queries& asked, std::uint32_t keys, float (&s)[sixteens][4], int lane) {
    std::uint32_t codes[sixteens][2][k_groups][words], ends[sixteens][2][k_groups];
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t at = keys + std::uint32_t((m * 16 + half * 8 + lane / 4) * k_row);
#pragma unroll
        for (int g = 0; g < k_groups; ++g) {
          ends[m][half][g] = word_at(at + std::uint32_t(g * bytes));
#pragma unroll
          for (int w = 0; w < words; ++w)
            codes[m][half][g][w] = word_at(at + std::uint32_t(g * bytes + 4 + w * 16 + lane % 4 * 4));
        }
      }
    }
    float part[sixteens][k_groups][4] = {};
#pragma unroll
    for (int w = 0; w < words; ++w) {
#pragma unroll
      for (int m = 0; m < sixteens; ++m) {
#pragma unroll
        for (int g = 0; g < k_groups; ++g) {
          std::uint32_t pairs[2][16 / bits];
#pragma unroll
          for (int half = 0; half < 2; ++half) pair_codes<bits>(codes[m][half][g][w], pairs[half]);
#pragma unroll
          for (int i = 0; i < 8 / bits; ++i) {
            const std::uint32_t left[4] = {pairs[0][i * 2], pairs[1][i * 2], pairs[0][i * 2 + 1], pairs[1][i * 2 + 1]};
            const std::uint32_t(&right)[2] = asked.q[(g * words + w) * (of_word / 4) + i];
            multiply<fp16>(part[m][g], left, right[0], right[1]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[m][i] = 0;
#pragma unroll
      for (int g = 0; g < k_groups; ++g) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 own = ends_of(ends[m][half][g]);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int i = half * 2 + j;
            s[m][i] = fmaf(own.y, part[m][g][i], fmaf(own.x, asked.sums[j][g], s[m][i]));
          }
        }
      }
    }
  }

  /// Turns a tile's logits into weights, and rescales sums and outputs to the new maximum.
  __device__ void weigh(float (&s)[sixteens][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float top = max[j];
#pragma unroll
      for (int m = 0; m < sixteens; ++m) top = fmaxf(top, fmaxf(s[m][j], s[m][2 + j]));
      top = across(top, [](float a, float b) { return fmaxf(a, b); });
      const float reference = softmax_reference(top);
      const float shrink = power_of_two(max[j] - reference);  // 2^-inf = 0: nothing seen so far
      float more = 0;
#pragma unroll
      for (int m = 0; m < sixteens; ++m) {
#pragma unroll
        for (int i = j; i < 4; i += 2) {
          s[m][i] = power_of_two(s[m][i] - reference);
          more += s[m][i];
        }
      }
      sum[j] = sum[j] * shrink + more;
      if (top != max[j]) {
#pragma unroll
        for (int i = 0; i < Dv / 16; ++i) out[i][j] *= shrink, out[i][2 + j] *= shrink;
#pragma unroll
        for (int g = 0; g < v_groups; ++g) lowest[g][j] *= shrink;
      }
      max[j] = top;
    }
  }

  /// Makes `unit` large enough for the tile's steps.
  __device__ void follow(float largest) {
    if (!__any_sync(~0u, largest > unit)) return;
    largest = across(largest, [](float a, float b) { return fmaxf(a, b); });
    const std::uint32_t exponent = umin((__float_as_uint(largest) >> 23) + 1, 253u);
    const float shrink = unit * __uint_as_float((254u - exponent) << 23);
    unit = __uint_as_float(exponent << 23), inverse_unit = __uint_as_float((254u - exponent) << 23);
#pragma unroll
    for (int n = 0; n < Dv / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= shrink;
    }
  }

  /// In a tile with masked tokens: 0 * NaN is NaN, so a NaN group of a token that a row must not see would reach the
  /// row's output. NaN ends become 0, and the sums of the rows that see them become NaN. It rarely has work.
  __device__ __noinline__ static void replace_nan(const float (&s)[sixteens][4],
                                                  std::uint32_t (&ends)[sixteens][2][v_groups],
                                                  float (&lowest)[v_groups][2]) {
    for (int i = 0; i < sixteens * 2 * v_groups; ++i) {
      const int m = i / v_groups / 2, half = i / v_groups % 2, g = i % v_groups;
      const float2 own = ends_of(ends[m][half][g]);
      if (own.x == own.x && own.y == own.y) continue;
      ends[m][half][g] = 0;
      for (int j = 0; j < 2; ++j) {
        if (s[m][half * 2 + j] != 0) lowest[g][j] = NAN;
      }
    }
  }
  __device__ void set_nan_aside(const float (&s)[sixteens][4], std::uint32_t (&ends)[sixteens][2][v_groups]) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < sixteens * 2 * v_groups; ++i) {
      const float2 own = ends_of(ends[i / v_groups / 2][i / v_groups % 2][i % v_groups]);
      found |= !(own.x + own.y == own.x + own.y);
    }
    if (!found) return;
    // Copies, so that the arrays of the common path stay in registers.
    float weights[sixteens][4], sums[v_groups][2];
    std::uint32_t copy[sixteens][2][v_groups];
#pragma unroll
    for (int i = 0; i < sixteens * 4; ++i) weights[i / 4][i % 4] = s[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < v_groups * 2; ++i) sums[i / 2][i % 2] = lowest[i / 2][i % 2];
#pragma unroll
    for (int i = 0; i < sixteens * 2 * v_groups; ++i)
      copy[i / v_groups / 2][i / v_groups % 2][i % v_groups] = ends[i / v_groups / 2][i / v_groups % 2][i % v_groups];
    replace_nan(weights, copy, sums);
#pragma unroll
    for (int i = 0; i < v_groups * 2; ++i) lowest[i / 2][i % 2] = sums[i / 2][i % 2];
#pragma unroll
    for (int i = 0; i < sixteens * 2 * v_groups; ++i)
      ends[i / v_groups / 2][i / v_groups % 2][i % v_groups] = copy[i / v_groups / 2][i / v_groups % 2][i % v_groups];
  }

  /// Eight channels of a token's group, those of row lane / 4: 32 bits of codes of 4, 16 of codes of 2.
  __device__ static std::uint32_t eight_codes(std::uint32_t address) {
    if constexpr (bits == 4) {
      return word_at(address);
    } else {
      std::uint16_t half;
      asm volatile("ld.shared.b16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
      return half;
    }
  }

  __device__ void multiply_values(const float (&s)[sixteens][4], std::uint32_t values, bool masked, int lane) {
    std::uint32_t ends[sixteens][2][v_groups];  // of the lane's tokens
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int g = 0; g < v_groups; ++g)
          ends[m][half][g] = word_at(values + std::uint32_t((m * 16 + half * 8 + lane / 4) * v_row + g * bytes));
      }
    }
    if (__builtin_expect(masked, 0)) set_nan_aside(s, ends);
    __half2 largest{};  // NaN is no number
#pragma unroll
    for (int i = 0; i < sixteens * 2 * v_groups; ++i) {
      const std::uint32_t& own = ends[i / v_groups / 2][i / v_groups % 2][i % v_groups];
      largest = __hmax2(largest, reinterpret_cast<const __half2&>(own));
    }
    follow(__high2float(largest));
#pragma unroll
    for (int m = 0; m < sixteens; ++m) {
#pragma unroll
      for (int g = 0; g < v_groups; ++g) {
        std::uint32_t codes[4];  // of tokens 2 (lane % 4), the next one, and those eight behind
        const std::uint32_t at =
            values + std::uint32_t((m * 16 + lane % 4 * 2) * v_row + g * bytes + 4 + lane / 4 * bits);
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = eight_codes(at + std::uint32_t((i / 2 * 8 + i % 2) * v_row));
        std::uint32_t right[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 own = ends_of(ends[m][half][g]);
          const float step = own.y * inverse_unit;
          float weight[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float plain = s[m][half * 2 + j];
            weight[j] = plain * step;
            lowest[g][j] = fmaf(plain, own.x, lowest[g][j]);
          }
          right[half] = transposed(pack_pair<fp16>(weight[0], weight[1]));
        }
#pragma unroll
        for (int part = 0; part < bits / 2; ++part) {  // of the eight channels
          std::uint32_t early[16 / bits], late[16 / bits];
          pair_codes<bits>(__byte_perm(codes[0], codes[1], part ? 0x7632 : 0x5410), early);
          pair_codes<bits>(__byte_perm(codes[2], codes[3], part ? 0x7632 : 0x5410), late);
#pragma unroll
          for (int i = 0; i < 8 / bits; ++i) {
            const std::uint32_t left[4] = {early[i * 2], early[i * 2 + 1], late[i * 2], late[i * 2 + 1]};
            multiply<fp16>(out[g * 4 + part * (8 / bits) + i], left, right[0], right[1]);
          }
        }
      }
    }
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
