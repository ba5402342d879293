// The softmax of one warp of the decode kernel over the tiles that it reads.
#pragma once

#include "../special_values.cuh"
#include "decode_tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Running softmax of one warp: 16 query rows over the tokens that it has seen, in the fragments of matrix products.
template <int Dv, int Tokens>
struct decode_softmax {
  float out[Dv / 8][4] = {};
  float max[2] = {-infinity, -infinity}, sum[2] = {};  // rows lane / 4 and lane / 4 + 8, base 2

  /// Turns a tile's logits into weights; outputs follow the new maximum.
  __device__ void weigh(float (&s)[Tokens / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int n = 0; n < Tokens / 8; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float reference = top == -infinity ? 0.0f : top;
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

  /// Adds weights times values where a weight of 0 hides a value that is not finite.
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
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    }
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

/// The state of one warp, which reads tiles of elements as they are given.
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

  /// Reads the tile of `tokens` tokens at `shared`. `logit_of(token, half, product)` gives the logit, in base 2, of
  /// query row lane / 4 + 8 * half; with `plain` that is product * scale2. `masked`: some row must not see some of
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
        for (int i = 0; i < 4; ++i) s[n][i] = logit_of(n * 8 + lane % 4 * 2 + i % 2, i / 2, s[n][i]);
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
      return __cvta_shared_to_generic(values + staged_rows{Dv / 8}.place(token, i));
    };
    if (masked && !special_values<T>::template all_finite<tokens, Dv / 8>(chunk, lane)) {
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

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
