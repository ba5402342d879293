// The softmax of one warp of the decode kernel over the tiles that it reads.
#pragma once

#include "../../../device/warp.cuh"
#include "../../detail/tile_values.cuh"
#include "decode_plan.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Running softmax of one warp: 16 query rows over its tokens so far, in the fragments of matrix products.
template <int Dv, int Tokens>
struct decode_softmax {
  float out[Dv / 8][4] = {};
  float max[2] = {-infinity, -infinity}, sum[2] = {};  // rows lane / 4 and lane / 4 + 8, base 2

  /// Turns a tile's logits into weights, and rescales the outputs to the new maximum.
  __device__ void weigh(float (&s)[Tokens / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int n = 0; n < Tokens / 8; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = lanes_max<4>(top);
      const float reference = softmax_reference(top);
      const float shrink = power_of_two(max[half] - reference);  // 2^-inf = 0: nothing seen so far
      float more = 0;
#pragma unroll
      for (int n = 0; n < Tokens / 8; ++n) {
        s[n][half * 2] = power_of_two(s[n][half * 2] - reference);
        s[n][half * 2 + 1] = power_of_two(s[n][half * 2 + 1] - reference);
        more += s[n][half * 2] + s[n][half * 2 + 1];
      }
      sum[half] = sum[half] * shrink + more;
      if (top != max[half]) {
#pragma unroll
        for (int n = 0; n < Dv / 8; ++n) {
          out[n][half * 2] *= shrink;
          out[n][half * 2 + 1] *= shrink;
        }
      }
      max[half] = top;
    }
  }

  /// Adds weights times values. A weight of 0 adds nothing even where the value is not finite.
  template <class T, class Fragment>
  __device__ void multiply_visible(const std::uint32_t (&weights)[Tokens / 16][4], const Fragment& fragment) {
    std::uint32_t own[Tokens / 16][4];
    float copy[Dv / 8][4];
#pragma unroll
    for (int i = 0; i < Tokens / 4; ++i) own[i / 4][i % 4] = weights[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) copy[i / 4][i % 4] = out[i / 4][i % 4];
    multiply_visible_values_aside<T, Tokens / 16, Dv / 8>(own, fragment, copy);
#pragma unroll
    for (int i = 0; i < Dv / 2; ++i) out[i / 4][i % 4] = copy[i / 4][i % 4];
  }

  /// Adds the four lanes' shares of every row's sum.
  __device__ void close() {
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = lanes_sum<4>(sum[half]);
  }
};

/// The weights of 16 tokens as the left side of a product.
template <class T>
__device__ __forceinline__ void pack_weights(const float (&low)[4], const float (&high)[4],
                                             std::uint32_t (&weights)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights[i] = pack_pair<T>(low[i * 2], low[i * 2 + 1]);
    weights[i + 2] = pack_pair<T>(high[i * 2], high[i * 2 + 1]);
  }
}

/// The softmax state of one warp that reads tiles of 16-bit elements.
template <class View>
struct decode_state : decode_softmax<View::v_dim, decode_config<View>::tokens> {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = decode_config<View>::tokens;
  static constexpr staged_rows k_rows{D / 8}, v_rows{Dv / 8};
  using base = decode_softmax<Dv, tokens>;
  using base::out, base::max, base::sum;

  /// 16 query rows, the left side of products with keys.
  struct queries {
    std::uint32_t q[D / 16][4];

    /// Row lane / 4 + 8 * half lies at `from`; null: zeros.
    __device__ void load(int half, const T* from, int lane) {
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          q[step][upper * 2 + half] =
              from ? *reinterpret_cast<const std::uint32_t*>(from + step * 16 + upper * 8 + lane % 4 * 2) : 0u;
        }
      }
    }
  };

  /// Reads the tile of `tokens` tokens at `shared`. `logit_of(token, row, product)` gives the logit, in base 2, of a
  /// query row of the block; with `plain` that is product * scale2. `masked`: some row must not see some of
  /// them. All lanes call it together.
  template <class LogitOf>
  __device__ void read(const queries& asked, std::uint32_t shared, bool plain, bool masked, float scale2,
                       const LogitOf& logit_of, int lane) {
    float s[tokens / 8][4] = {};
    multiply_keys(asked.q, shared, s, lane);
    if (plain) {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scale2;
      }
    } else {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = logit_of(n * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8, s[n][i]);
      }
    }
    base::weigh(s);
    const std::uint32_t values = shared + std::uint32_t(tokens * k_rows.bytes());
    std::uint32_t weights[tokens / 16][4];
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) pack_weights<T>(s[k * 2], s[k * 2 + 1], weights[k]);
    const int matrix = lane / 8, in_matrix = lane % 8;
    const std::uint32_t v_at = values + std::uint32_t((matrix % 2 * 8 + in_matrix) * v_rows.bytes());
    const std::uint32_t v_chunk = std::uint32_t(v_rows.swizzled() ? matrix / 2 ^ in_matrix : matrix / 2) * 16;
    const auto fragment = [=](int k, int pair, std::uint32_t(&b)[4]) {
      load_matrices_transposed(b, v_at + std::uint32_t(k * 16 * v_rows.bytes()) +
                                      (v_rows.swizzled() ? v_chunk ^ std::uint32_t(pair * 32) : v_chunk + pair * 32));
    };
    const auto chunk = [&](int token, int i) {
      return __cvta_shared_to_generic(values + staged_rows{Dv / 8}.offset(token, i));
    };
    if (__builtin_expect(masked, 0) && !special_values<T>::template all_finite<tokens, Dv / 8>(chunk, lane)) {
      base::template multiply_visible<T>(weights, fragment);
      return;
    }
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) {
#pragma unroll
      for (int pair = 0; pair < Dv / 16; ++pair) {
        std::uint32_t b[4];
        fragment(k, pair, b);
        multiply<T>(out[pair * 2], weights[k], b[0], b[1]);
        multiply<T>(out[pair * 2 + 1], weights[k], b[2], b[3]);
      }
    }
  }

  /// Writes the first `used` rows to shared memory: outputs `merge_pitch` apart, then their states.
  __device__ void store(float* outs, float2* states, int used, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + half * 8;
      if (r >= used) continue;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) {
        *reinterpret_cast<float2*>(outs + r * merge_pitch(Dv) + n * 8 + lane % 4 * 2) =
            make_float2(out[n][half * 2], out[n][half * 2 + 1]);
      }
      if (lane % 4 == 0) states[r] = make_float2(max[half], sum[half]);
    }
  }

 private:
  __device__ static void multiply_keys(const std::uint32_t (&q)[D / 16][4], std::uint32_t keys,
                                       float (&s)[tokens / 8][4], int lane) {
    float odd[tokens / 8][4] = {};  // two chains of products, half as long
    const int matrix = lane / 8, in_matrix = lane % 8;
    const std::uint32_t k_at = keys + std::uint32_t((matrix / 2 * 8 + in_matrix) * k_rows.bytes());
    const std::uint32_t k_chunk = std::uint32_t(k_rows.swizzled() ? matrix % 2 ^ in_matrix : matrix % 2) * 16;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < tokens / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices(b, k_at + std::uint32_t(pair * 16 * k_rows.bytes()) +
                             (k_rows.swizzled() ? k_chunk ^ std::uint32_t(step * 32) : k_chunk + step * 32));
        multiply<T>(step % 2 ? odd[pair * 2] : s[pair * 2], q[step], b[0], b[1]);
        multiply<T>(step % 2 ? odd[pair * 2 + 1] : s[pair * 2 + 1], q[step], b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    }
  }
};

// The softmax of one warp of the decode kernel over tiles of rows of bytes, which are multiplied as fp16.

/// Four neighbouring e4m3, or whole numbers, as two pairs of fp16: exact.
template <std::same_as<fp8> Byte>
__device__ __forceinline__ void decode_bytes(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(four));
#else
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    fp8 one;
    one.bits = std::uint8_t(four >> i * 8);
    x[i] = float(one);
  }
  low = pack_pair<fp16>(x[0], x[1]), high = pack_pair<fp16>(x[2], x[3]);
#endif
}
template <std::same_as<int8> Byte>
__device__ __forceinline__ void decode_bytes(std::uint32_t four, std::uint32_t& low, std::uint32_t& high) {
  const std::uint32_t above = four ^ 0x80808080u, bias = 0x64806480u;  // 128 more; fp16 of 1024 + 128
  const std::uint32_t first = __byte_perm(above, 0x64646464u, 0x4140), second = __byte_perm(above, 0x64646464u, 0x4342);
  const __half2 pairs[2] = {__hsub2(reinterpret_cast<const __half2&>(first), reinterpret_cast<const __half2&>(bias)),
                            __hsub2(reinterpret_cast<const __half2&>(second), reinterpret_cast<const __half2&>(bias))};
  low = reinterpret_cast<const std::uint32_t&>(pairs[0]), high = reinterpret_cast<const std::uint32_t&>(pairs[1]);
}

/// The state of one warp, which reads tiles of e4m3 or int8 rows and their scales. A key's scale multiplies its token's
/// logit, a value's its token's weight.
///
/// Keys: a lane takes four neighbouring dims of a token at a time, so that dims 4j to 4j + 3 of each sixteen stand
/// where the product has its 2j, 2j + 1, 2j + 8 and 2j + 9; queries are loaded in the same order. Values: pairs of dims
/// are transposed as if they were one element; of the eight columns of two products, one has the even and one the odd
/// dims.
template <class View>
struct decode_state_bytes : decode_softmax<View::v_dim, decode_config<View>::tokens> {
  using format = decode_format<View>;
  using T = typename View::element_type;
  using byte = typename format::stored_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = decode_config<View>::tokens;
  static constexpr int k_row = format::k_rows.bytes(), v_row = format::v_rows.bytes();
  using base = decode_softmax<Dv, tokens>;
  using base::out, base::max, base::sum;

  /// Weights, and so outputs, are divided by this power of two. It is at least the largest scale of a value so far, so
  /// weights are at most 1 and fp16 represents them.
  float unit = format::scaled ? 0.0f : 1.0f, inverse_unit = format::scaled ? 0.0f : 1.0f;

  struct queries {
    std::uint32_t q[D / 16][4];  // fp16
    float factor[2];             // that row lane / 4 + 8 * half has been divided by

    __device__ void load(int half, const T* from, int lane) {
      uint2 four[D / 16];
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        four[step] = from ? *reinterpret_cast<const uint2*>(from + step * 16 + lane % 4 * 4) : uint2{};
      }
      factor[half] = 1;
      if constexpr (std::is_same_v<T, fp16>) {
#pragma unroll
        for (int step = 0; step < D / 16; ++step) q[step][half] = four[step].x, q[step][half + 2] = four[step].y;
      } else {
        // fp16 has more digits than bf16 but a shorter range: the row is scaled so that its largest element is near
        // 2^8.
        std::uint32_t largest = 0;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
#pragma unroll
          for (const std::uint32_t two : {four[step].x, four[step].y}) {
            largest = umax(largest, umax(two & 0x7fff0000u, two << 16 & 0x7fff0000u));
          }
        }
        largest = umax(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = umax(largest, __shfl_xor_sync(~0u, largest, 2));
        const std::uint32_t exponent = umin(262u - (largest >> 23), 253u);
        const float up = __uint_as_float(exponent << 23);
        factor[half] = __uint_as_float((254u - exponent) << 23);
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          q[step][half] = scaled_pair(four[step].x, up), q[step][half + 2] = scaled_pair(four[step].y, up);
        }
      }
    }
    __device__ static std::uint32_t scaled_pair(std::uint32_t two, float by) {
      return pack_pair<fp16>(__uint_as_float(two << 16) * by, __uint_as_float(two & 0xffff0000u) * by);
    }
  };

  /// As decode_state's.
  template <class LogitOf>
  __device__ void read(const queries& asked, std::uint32_t shared, bool plain, bool masked, float scale2,
                       const LogitOf& logit_of, int lane) {
    const std::uint32_t values = shared + std::uint32_t(tokens * k_row);
    const std::uint32_t scales = values + std::uint32_t(tokens * v_row) + lane % 4 * 8;  // of this lane's tokens
    float s[tokens / 8][4] = {};
    multiply_keys(asked.q, shared, s, lane);
    const float factors[2] = {asked.factor[0] * (plain ? scale2 : 1.0f), asked.factor[1] * (plain ? scale2 : 1.0f)};
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
      const float2 scale = scales_of(scales, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= (i % 2 ? scale.y : scale.x) * factors[i / 2];
    }
    if (!plain) {
#pragma unroll
      for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = logit_of(n * 8 + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8, s[n][i]);
      }
    }
    base::weigh(s);
    if constexpr (format::scaled) scale_weights(s, scales + tokens * 4, masked);
    std::uint32_t weights[tokens / 16][4];
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) pack_weights<fp16>(s[k * 2], s[k * 2 + 1], weights[k]);
    multiply_values(weights, values, masked, lane);
  }

  /// As decode_state's.
  __device__ void store(float* outs, float2* states, int used, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = lane / 4 + half * 8;
      if (r >= used) continue;
#pragma unroll
      for (int n = 0; n < Dv / 8; n += 2) {
        *reinterpret_cast<float4*>(outs + r * merge_pitch(Dv) + n * 8 + lane % 4 * 4) =
            make_float4(out[n][half * 2] * unit, out[n + 1][half * 2] * unit, out[n][half * 2 + 1] * unit,
                        out[n + 1][half * 2 + 1] * unit);
      }
      if (lane % 4 == 0) states[r] = make_float2(max[half], sum[half]);
    }
  }

 private:
  /// Scales of the lane's two tokens of the n-th eight.
  __device__ static float2 scales_of(std::uint32_t at, int n) {
    float2 two = make_float2(1, 1);
    if constexpr (format::scaled) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(at + n * 32) : "memory");
    }
    return two;
  }

  /// The lane's address of 16-byte chunks 2 * pair and 2 * pair + 1 of 16 rows of `Chunks`, as four matrices: rows 0 to
  /// 7 and 8 to 15 of each chunk. If the number of chunks is odd, the last chunk is loaded twice.
  template <staged_rows Rows>
  __device__ static std::uint32_t chunk_pair(std::uint32_t rows, int pair, int lane) {
    const int matrix = lane / 8, in_matrix = lane % 8, second = pair * 2 + 1 < Rows.chunks ? matrix / 2 : 0;
    const int chunk = Rows.swizzled() ? (second ^ in_matrix) ^ pair * 2 : second + pair * 2;
    return rows + std::uint32_t((matrix % 2 * 8 + in_matrix) * Rows.bytes() + chunk * 16);
  }

  __device__ static void multiply_keys(const std::uint32_t (&q)[D / 16][4], std::uint32_t keys,
                                       float (&s)[tokens / 8][4], int lane) {
    float odd[tokens / 8][4] = {};  // two chains of products, half as long
#pragma unroll
    for (int pair = 0; pair < (D / 16 + 1) / 2; ++pair) {
#pragma unroll
      for (int k = 0; k < tokens / 16; ++k) {
        std::uint32_t b[4], low, high;
        load_matrices(b, chunk_pair<format::k_rows>(keys + std::uint32_t(k * 16 * k_row), pair, lane));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int step = pair * 2 + i / 2;
          if (step >= D / 16) continue;
          decode_bytes<byte>(b[i], low, high);
          multiply<fp16>(i / 2 ? odd[k * 2 + i % 2] : s[k * 2 + i % 2], q[step], low, high);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
    }
  }

  /// Multiplies weights by their values' scales, in units of `unit`, which follows the largest scale.
  __device__ void scale_weights(float (&s)[tokens / 8][4], std::uint32_t scales, bool masked) {
    float2 scale[tokens / 8];
    float largest = 0;
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
      scale[n] = scales_of(scales, n);
      if (masked) {  // 0 * NaN: a token that no row sees has no scale
        if (s[n][0] == 0 && s[n][2] == 0) scale[n].x = 0;
        if (s[n][1] == 0 && s[n][3] == 0) scale[n].y = 0;
      }
      largest = fmaxf(largest, fmaxf(scale[n].x, scale[n].y));
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    if (largest > unit) {
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
#pragma unroll
    for (int n = 0; n < tokens / 8; ++n) {
      const float by[2] = {scale[n].x * inverse_unit, scale[n].y * inverse_unit};
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = masked && s[n][i] == 0 ? 0.0f : s[n][i] * by[i % 2];
    }
  }

  /// Loads 16 tokens and a pair of chunks: for each chunk its even dims, then its odd ones.
  __device__ static void load_values(std::uint32_t (&b)[2][4], std::uint32_t values, int k, int pair, int lane) {
    std::uint32_t raw[4];
    load_matrices_transposed(raw, chunk_pair<format::v_rows>(values + std::uint32_t(k * 16 * v_row), pair, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // `raw` has dims 2n and 2n + 1 of one token, then of the next; the product wants one dim of both tokens.
      decode_bytes<byte>(__byte_perm(raw[i], 0, 0x3120), b[i / 2][i % 2], b[i / 2][2 + i % 2]);
    }
  }

  __device__ void multiply_values(const std::uint32_t (&weights)[tokens / 16][4], std::uint32_t values, bool masked,
                                  int lane) {
    if (__builtin_expect(masked, 0) && !all_finite(values, lane)) {
      const auto fragment = [=](int k, int chunk, std::uint32_t(&b)[4]) {
        std::uint32_t both[2][4];
        load_values(both, values, k, chunk / 2, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = both[chunk % 2][i];
      };
      base::template multiply_visible<fp16>(weights, fragment);
      return;
    }
#pragma unroll
    for (int k = 0; k < tokens / 16; ++k) {
#pragma unroll
      for (int pair = 0; pair < (Dv / 16 + 1) / 2; ++pair) {
        std::uint32_t b[2][4];
        load_values(b, values, k, pair, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int chunk = pair * 2 + i;
          if (chunk >= Dv / 16) continue;
          multiply<fp16>(out[chunk * 2], weights[k], b[i][0], b[i][1]);
          multiply<fp16>(out[chunk * 2 + 1], weights[k], b[i][2], b[i][3]);
        }
      }
    }
  }

  /// Whether the tile's values are finite. The only e4m3 value that is not finite is NaN; whole numbers are.
  __device__ static bool all_finite(std::uint32_t values, int lane) {
    if constexpr (std::is_same_v<byte, int8>) {
      return true;
    } else {
      std::uint32_t special = 0;
      for (int id = lane; id < tokens * (Dv / 16); id += 32) {
        const std::uint32_t at = values + staged_rows{Dv / 16}.offset(id / (Dv / 16), id % (Dv / 16));
        const uint4 chunk = *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(at));
        for (const std::uint32_t four : {chunk.x, chunk.y, chunk.z, chunk.w}) {
          special |= (four & 0x7f7f7f7fu) + 0x01010101u;
        }
      }
      return __all_sync(~0u, (special & 0x80808080u) == 0);
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
