// What a warp knows of 8 query rows while it attends tiles of 32 packed rows.
#pragma once

#include "packed_state.cuh"
#include "packed_tiles.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Calls run(m) for every 16 of `channels`, a multiple of 16. A quarter of the channels is usually left out: that many
/// without a branch.
template <int Dv, class Run>
__device__ __forceinline__ void with_matrices(int channels, const Run& run) {
  constexpr int usual = int(whole_channels(Dv * 3 / 4)) / 16;
  if (channels == usual * 16) {
#pragma unroll
    for (int m = 0; m < usual; ++m) run(m);
    return;
  }
#pragma unroll
  for (int m = 0; m < Dv / 16; ++m) {
    if (m * 16 >= channels) break;
    run(m);
  }
}

/// Softmax state and summed values of 8 query rows, in parts of 4 as `multiply_row` gives their logits: a lane has
/// those of its token. Lane l holds of rows l % 4 * 2 and the next one the values of channel l / 4 of every 8; sums are
/// of a lane until `write`. What a row has but one of lies in shared memory: registers decide how many warps there are.
template <class Tile, int Dv>
struct spread_state {
  /// How far logits of base 2 may rise above the one that sums refer to before all sums are scaled: weights stay
  /// finite, and after some tiles hardly anything is scaled.
  static constexpr float slack = std::is_same_v<Tile, bf16> ? 8 : 0;  // fp16 ends at 65,504, and scales may be large
  static constexpr float lowest = -3e38f;  // below every logit, and still finite: nothing was seen
  float acc[Dv / 16][4] = {};
  float4* const shared;  // [parts], what sums refer to, and behind it [parts, 32] sums of lanes

  /// Bytes of shared memory for one warp.
  TESSERA_HD static constexpr int bytes(int parts) { return parts * (tile_tokens + 1) * int(sizeof(float4)); }

  /// By one warp; the caller synchronises it.
  __device__ __forceinline__ spread_state(unsigned char* from, int parts) : shared(reinterpret_cast<float4*>(from)) {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (int i = 0; i < parts; ++i) {
      if (lane == 0) most(i) = make_float4(lowest, lowest, lowest, lowest);
      sums(parts, i, lane) = make_float4(0, 0, 0, 0);
    }
  }

  /// Takes in the logits of 32 tokens for rows part * 4 and on, in base 2; -infinity: not seen. `weight` multiplies the
  /// token's values; what they are multiplied with in all is written to weights [8, 32].
  __device__ __forceinline__ void take_logits(int parts, int part, const float (&x)[queries_at_once], float weight,
                                              unsigned char* weights) {
    const int lane = lane_here();
    const float4 before = most(part), added = sums(parts, part, lane);
    float top[queries_at_once] = {before.x, before.y, before.z, before.w};
    float sum[queries_at_once] = {added.x, added.y, added.z, added.w};
    bool rises = false;
#pragma unroll
    for (int i = 0; i < queries_at_once; ++i) rises = rises || x[i] > top[i] + slack;
    if (__any_sync(~0u, rises)) {
      float shrink[queries_at_once];
#pragma unroll
      for (int i = 0; i < queries_at_once; ++i) {
        const float old = top[i];
        top[i] = fmaxf(old, warp_max(fmaxf(x[i], -infinity)));
        shrink[i] = exp2f(old - top[i]);
        sum[i] *= shrink[i];
      }
      __syncwarp();
      if (lane == 0) most(part) = make_float4(top[0], top[1], top[2], top[3]);
      const bool own = lane % 4 / 2 == part, odd = lane % 2;
      const float of_rows[2] = {own ? (odd ? shrink[2] : shrink[0]) : 1.0f, own ? (odd ? shrink[3] : shrink[1]) : 1.0f};
#pragma unroll
      for (int m = 0; m < Dv / 16; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][i] *= of_rows[i % 2];
      }
    }
    float p[queries_at_once];
#pragma unroll
    for (int i = 0; i < queries_at_once; ++i) {
      p[i] = power_of_two(x[i] - top[i]);
      sum[i] += p[i];
    }
    sums(parts, part, lane) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    auto* to = reinterpret_cast<std::uint16_t*>(weights) + part * queries_at_once * tile_tokens + paired(lane);
#pragma unroll
    for (int i = 0; i < queries_at_once; i += 2) {
      const std::uint32_t two = pack_pair<Tile>(p[i] * weight, p[i + 1] * weight);
      to[i * tile_tokens] = std::uint16_t(two), to[(i + 1) * tile_tokens] = std::uint16_t(two >> 16);
    }
  }

  /// Adds the tile's values up, of which `channels`, a multiple of 16, are there.
  __device__ __forceinline__ void take_values(const unsigned char* tile, const unsigned char* weights, int parts,
                                              int channels) {
    const values_taken from(tile, weights, parts);
    with_matrices<Dv>(
        channels, [&](int m) __attribute__((always_inline)) { take_matrix(from, m); });
  }

  /// Adds the lanes' sums up, and writes most and sum [8, 2] and the summed values [8, Dv]. By one warp.
  __device__ __forceinline__ void write(int parts, float* states, float* to, int channels) const {
    const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const float4 reference = most(part), added = sums(parts, part, lane);
      const float top[queries_at_once] = {reference.x, reference.y, reference.z, reference.w};
      const float sum[queries_at_once] = {added.x, added.y, added.z, added.w};
#pragma unroll
      for (int i = 0; i < queries_at_once; ++i) {
        const float whole = warp_sum(sum[i]);
        if (lane != 0) continue;
        states[(part * queries_at_once + i) * 2] = top[i] == lowest ? -infinity : top[i];
        states[(part * queries_at_once + i) * 2 + 1] = whole;
      }
    }
#pragma unroll
    for (int m = 0; m < Dv / 16; ++m) {
      if (m * 16 >= channels) break;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* row = to + (lane % 4 * 2 + i) * Dv + m * 16 + lane / 4;
        row[0] = acc[m][i], row[8] = acc[m][i + 2];
      }
    }
  }

 private:
  __device__ __forceinline__ float4& most(int part) const { return shared[part]; }
  __device__ __forceinline__ float4& sums(int parts, int part, int lane) const {
    return shared[parts + part * tile_tokens + lane];
  }
  /// Where a token's number of 16 bits stands in a row of 32: tokens t and t + 16 are neighbours.
  __device__ static __forceinline__ int paired(int token) { return token % 16 * 2 + token / 16; }

  /// What a lane multiplies: four pairs of tokens, lane % 4 * 4 and on, two in the first product and two in the second.
  struct values_taken {
    uint4 p = {};  // of rows that are not there
    const unsigned char* values;
    __device__ __forceinline__ values_taken(const unsigned char* tile, const unsigned char* weights, int parts) {
      const int lane = lane_here(), row = lane / 4, place = row * tile_tokens * 2 + lane % 4 * 16;
      if (row < parts * queries_at_once) p = *reinterpret_cast<const uint4*>(weights + place);
      values = tile + place;
    }
  };
  __device__ __forceinline__ void take_matrix(const values_taken& from, int m) {
    constexpr int channel = tile_tokens * 2;  // bytes
    const uint4 x = *reinterpret_cast<const uint4*>(from.values + m * 16 * channel);
    const uint4 y = *reinterpret_cast<const uint4*>(from.values + (m * 16 + 8) * channel);
    const std::uint32_t first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
    multiply<Tile>(acc[m], first, from.p.x, from.p.y);
    multiply<Tile>(acc[m], second, from.p.z, from.p.w);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
