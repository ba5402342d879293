// What a warp knows of its 16 query rows while it attends packed rows: 16 tokens at a time, by matrix instructions.
#pragma once

#include "../../device/logit.cuh"
#include "packed_tiles.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Queries of 16 rows in shared memory as two numbers of 16 bits, whose sum is the fp32 that a rotation gives; the second part may be
/// 0 throughout.
struct split_queries {
  std::uint32_t high, low;  // addresses of staged rows
  bool exact;               // the first part is all of it
};

/// Softmax state and summed values of 16 query rows. Lane l holds columns l % 4 * 2 and the next one of every 8, of rows l / 4 and
/// l / 4 + 8; sums are of a lane until `finish`.
template <class Tile, int D, int Dv>
struct packed_state {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  float most[2] = {-infinity, -infinity}, sum[2] = {};
  float acc[Dv / 8][4] = {};

  /// logits [16, 16] of 16 keys. `channels`: how many, a multiple of 16.
  __device__ __forceinline__ static void dot(const split_queries& q, std::uint32_t keys, int channels,
                                             float (&logits)[2][4]) {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll 4
    for (int step = 0; step < channels / 16; ++step) {
      std::uint32_t a[4], b[4];
      const std::uint32_t q_place = k_rows().place(in_matrix + matrix % 2 * 8, step * 2 + matrix / 2);
      load_matrices(b, keys + k_rows().place(in_matrix + matrix / 2 * 8, step * 2 + matrix % 2));
      load_matrices(a, q.high + q_place);
      multiply<Tile>(logits[0], a, b[0], b[1]);
      multiply<Tile>(logits[1], a, b[2], b[3]);
      if (q.exact) continue;
      load_matrices(a, q.low + q_place);
      multiply<Tile>(logits[0], a, b[0], b[1]);
      multiply<Tile>(logits[1], a, b[2], b[3]);
    }
  }

  /// Takes in 16 tokens. logit(x, i) of a column's dot product in base 2; sees(i, j): may row half i see column j of this lane; columns
  /// j = 0 to 3 are l % 4 * 2, the next one, and both 8 further on. weight(j) multiplies a column's value.
  template <class Logit, class Sees, class Weight>
  __device__ __forceinline__ void take(float (&logits)[2][4], std::uint32_t values, int channels, const Logit& logit,
                                       const Sees& sees, const Weight& weight) {
    std::uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float x[4], top = most[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = sees(i, j) ? logit(logits[j / 2][i * 2 + j % 2], j) : -infinity;
        top = fmaxf(top, x[j]);
      }
      top = lanes_max<4>(top);
      const float reference = top == -infinity ? 0.0f : top, shrink = exp2f(most[i] - reference);
      most[i] = top;
      sum[i] *= shrink;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) acc[n][i * 2] *= shrink, acc[n][i * 2 + 1] *= shrink;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[j] = exp2f(x[j] - reference);
        sum[i] += x[j];
        x[j] *= weight(j);
      }
      p[i] = pack_pair<Tile>(x[0], x[1]);
      p[i + 2] = pack_pair<Tile>(x[2], x[3]);
    }
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int n = 0; n < Dv / 16; ++n) {
      if (n * 16 >= channels) break;
      std::uint32_t b[4];
      load_matrices_transposed(b, values + v_rows().place(in_matrix + matrix % 2 * 8, n * 2 + matrix / 2));
      multiply<Tile>(acc[n * 2], p, b[0], b[1]);
      multiply<Tile>(acc[n * 2 + 1], p, b[2], b[3]);
    }
  }

  /// Adds the lanes' sums up, and writes most and sum [16, 2] and the summed values [16, Dv]. By one warp.
  __device__ __forceinline__ void write(float* states, float* to, int channels) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + i * 8;
      const float whole = lanes_sum<4>(sum[i]);
      if (lane % 4 == 0) states[row * 2] = most[i], states[row * 2 + 1] = whole;
#pragma unroll
      for (int n = 0; n < Dv / 8; ++n) {
        if (n * 8 >= channels) break;
        float* at = to + row * Dv + n * 8 + lane % 4 * 2;
        at[0] = acc[n][i * 2], at[1] = acc[n][i * 2 + 1];
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
