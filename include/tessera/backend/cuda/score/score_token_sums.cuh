// How the weights of query rows become a token's score: free order where it is cheaper, row order where bits must last.
#pragma once

#include "../../../concepts/scorer.hpp"
#include "../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Running sums of a warp's 16 * KeyTiles tokens over query rows.
///
/// Weights come as a 16x8x16 product leaves them: lane l holds tokens l / 4 + {0, 8} of each key tile against rows
/// 2 * (l % 4) + {0, 1} of each 8. In order, one lane adds all rows of a token one by one, and what later calls add
/// continues the same chain; else each lane keeps parts of its tokens and the four lanes meet at the end. `Maximum`:
/// the largest weight in place of their sum; a NaN stays.
template <int KeyTiles, bool InOrder, bool Maximum = false>
struct score_sums {
  static constexpr int tokens = KeyTiles * 2;  // of a lane
  float sum[InOrder ? 1 : tokens];

  __device__ static float join(float a, float b) {
    if constexpr (Maximum) {
      float most;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
      return most;
    } else {
      return a + b;
    }
  }

  /// The token that a lane adds in order: with one key tile, two lanes keep the same.
  __device__ static int own(int lane) { return lane % (KeyTiles == 2 ? 4 : 2) * 8 + lane / 4; }

  /// Goes on from stored scores; `left` tokens are stored from the first on.
  __device__ void resume(const float* scores, index_t left, int lane) {
    if constexpr (InOrder) {
      if (own(lane) < left) sum[0] = scores[own(lane)];
    }
  }

  /// Adds weights w[key tile][8 rows][token half * 2 + row parity] of 16 query rows.
  __device__ void add(const float (&w)[KeyTiles][2][4], int lane) {
    if constexpr (!InOrder) {
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        const int k = i / 2, h = i % 2 * 2;
        sum[i] = join(sum[i], join(join(w[k][0][h], w[k][0][h + 1]), join(w[k][1][h], w[k][1][h + 1])));
      }
    } else if constexpr (KeyTiles == 2) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float x[4][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i][0] = w[i / 2][n][i % 2 * 2], x[i][1] = w[i / 2][n][i % 2 * 2 + 1];
        transpose(x, lane);
        sum[0] = add_rows(sum[0], x);
      }
    } else {
      // Lanes 0 and 1 add the first 8 rows of their token, then lanes 2 and 3 the other 8 of the same tokens.
      float x[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i][0] = w[0][i / 2][i % 2 * 2], x[i][1] = w[0][i / 2][i % 2 * 2 + 1];
      transpose(x, lane);
      const float first = __shfl_sync(~0u, add_rows(sum[0], x), lane & ~2);
      sum[0] = __shfl_sync(~0u, add_rows(first, x), lane | 2);
    }
  }

  __device__ void write(float* scores, index_t left, bool accumulate, int lane) {
    if constexpr (InOrder) {
      if (lane % 4 < tokens && own(lane) < left) scores[own(lane)] = sum[0];
    } else {
#pragma unroll
      for (int i = 0; i < tokens; ++i) {
        if constexpr (Maximum) {
#pragma unroll
          for (int step = 1; step < 4; step *= 2) sum[i] = join(sum[i], __shfl_xor_sync(~0u, sum[i], step));
        } else {
          sum[i] = lanes_sum<4>(sum[i]);
        }
        const int token = i * 8 + lane / 4;
        if (lane % 4 == 0 && token < left) scores[token] = accumulate ? join(scores[token], sum[i]) : sum[i];
      }
    }
  }

 private:
  /// 4x4 transpose over the four lanes that share tokens: lane l gets item l of every lane, in order of rows.
  __device__ static void transpose(float (&x)[4][2], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const bool upper = lane & step;
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        if (a & step) continue;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float got = __shfl_xor_sync(~0u, upper ? x[a][j] : x[a + step][j], step);
          (upper ? x[a][j] : x[a + step][j]) = got;
        }
      }
    }
  }
  __device__ static float add_rows(float total, const float (&x)[4][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total = join(join(total, x[i][0]), x[i][1]);
    return total;
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
