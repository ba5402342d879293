// What a warp knows of its 8 query rows while it attends rows that are whole: 16 tokens at a time, by matrix
// instructions.
#pragma once

#include "../../device/logit.cuh"
#include "../../device/mma.cuh"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Query rows that a block attends together, and tokens of whole rows that a warp takes at a time.
inline constexpr int query_rows_together = 8, whole_tokens = 16;

/// Softmax state and summed values of 8 query rows. Lane l holds the softmax of row l / 4, and of rows l % 4 * 2 and
/// the next one values of channel l / 4 of every 8; sums are of a lane until `write`.
template <class Tile, int D, int Dv>
struct packed_state {
  TESSERA_HD static constexpr staged_rows k_rows() { return {D / 8}; }
  TESSERA_HD static constexpr staged_rows v_rows() { return {Dv / 8}; }
  std::uint32_t q[D / 16][4];
  float most = -infinity, sum = 0;
  float acc[Dv / 16][4] = {};

  /// `queries`: the address of 16 staged rows, the first numbers of 8 and the second ones.
  __device__ __forceinline__ packed_state(std::uint32_t queries, int channels) {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      if (step * 16 >= channels) break;
      load_matrices(q[step], queries + k_rows().place(in_matrix + matrix % 2 * 8, step * 2 + matrix / 2));
    }
  }

  /// logits of 16 keys: lane l has row l / 4, keys l % 4 * 2, the next one, and both 8 further on. `channels`: a
  /// multiple of 16.
  __device__ __forceinline__ void dot(std::uint32_t keys, int channels, float (&logits)[4]) const {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
    float parts[2][4] = {};
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      if (step * 16 >= channels) break;
      std::uint32_t b[4];
      load_matrices(b, keys + k_rows().place(in_matrix + matrix / 2 * 8, step * 2 + matrix % 2));
      multiply<Tile>(parts[0], q[step], b[0], b[1]);
      multiply<Tile>(parts[1], q[step], b[2], b[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) logits[j] = parts[j / 2][j % 2] + parts[j / 2][j % 2 + 2];
  }

  /// Takes in 16 tokens. logit(x, j) of a dot product in base 2; sees(j): may the lane's row see token j of those that
  /// `dot` names; weight(j) multiplies its value.
  template <class Logit, class Sees, class Weight>
  __device__ __forceinline__ void take(const float (&logits)[4], std::uint32_t values, int channels, const Logit& logit,
                                       const Sees& sees, const Weight& weight) {
    const int lane = int(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
    float x[4], top = most;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = sees(j) ? logit(logits[j], j) : -infinity;
      top = fmaxf(top, x[j]);
    }
    top = lanes_max<4>(top);
    const float reference = top == -infinity ? 0.0f : top, shrink = exp2f(most - reference);
    most = top;
    sum *= shrink;
    const float of_rows[2] = {__shfl_sync(~0u, shrink, lane % 4 * 8), __shfl_sync(~0u, shrink, lane % 4 * 8 + 4)};
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][i] *= of_rows[i % 2];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = exp2f(x[j] - reference);
      sum += x[j];
      x[j] *= weight(j);
    }
    const std::uint32_t p[2] = {pack_pair<Tile>(x[0], x[1]), pack_pair<Tile>(x[2], x[3])};
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {  // channels are rows of the product
      if (m * 16 >= channels) break;
      std::uint32_t a[4];
      load_matrices_transposed(a, values + v_rows().place(in_matrix + matrix / 2 * 8, m * 2 + matrix % 2));
      multiply<Tile>(acc[m], a, p[0], p[1]);
    }
  }

  /// Adds the lanes' sums up, and writes most and sum [8, 2] and the summed values [8, Dv]. By one warp.
  __device__ __forceinline__ void write(int, float* states, float* to, int channels) const {
    const int lane = int(threadIdx.x) % 32;
    const float whole = lanes_sum<4>(sum);
    if (lane % 4 == 0) states[lane / 4 * 2] = most, states[lane / 4 * 2 + 1] = whole;
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
      if (m * 16 >= channels) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(lane % 4 * 2 + i % 2) * Dv + m * 16 + lane / 4 + i / 2 * 8] = acc[m][i];
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
