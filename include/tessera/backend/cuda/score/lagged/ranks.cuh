// Ranks of a partition's slots by how much they spread, on the GPU.
#pragma once

#include "../../../../concepts/scorer.hpp"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Half of each softmax of a partition's spreads, which take the spreads' place; a warp's work.
__device__ inline void halve_softmax(float* spreads, index_t lag) {
  const index_t lane = threadIdx.x % 32;
  float top = -infinity, total = 0;
  for (index_t i = lane; i < lag; i += 32) top = spreads[i] < infinity ? fmaxf(top, spreads[i]) : top;
  top = warp_max(top);
  for (index_t i = lane; i < lag; i += 32) {
    const float power = spreads[i] < infinity ? expf(spreads[i] - top) : nanf("");
    spreads[i] = power;
    total += power == power ? power : 0.0f;
  }
  total = warp_sum(total);
  for (index_t i = lane; i < lag; i += 32) spreads[i] = spreads[i] / total / 2;
}

/// What a slot ranks by: sums are not negative, so their bits order as they do, and -1 stands for NaN.
__device__ inline int spread_key(float sum) { return sum == sum ? __float_as_int(sum) : -1; }
/// x < y as a number to add, in two instructions; keys are less than 2^31 apart.
__device__ inline int is_less(int x, int y) { return int(unsigned(x - y) >> 31); }

/// Writes what a partition's slots come to: how many rank behind each of them; a warp's work. `values` becomes what they rank by.
template <class Scorer>
__device__ void rank_partition(const Scorer& scorer, const float* keys, float* values, float* out) {
  constexpr int at_once = 4, absent = -2;
  const index_t lane = threadIdx.x % 32, lag = scorer.lag;
  int* ranked_by = reinterpret_cast<int*>(values);
  for (index_t i = lane; i < lag; i += 32) ranked_by[i] = spread_key(keys[i] + values[i]);
  __syncwarp();
  for (index_t first = 0; first < lag; first += 32 * at_once) {
    int own[at_once], behind[at_once] = {}, limit[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) own[k] = first + k * 32 + lane < lag ? ranked_by[first + k * 32 + lane] : absent;
    for (index_t others = 0; others < lag; others += 32) {
#pragma unroll
      for (int k = 0; k < at_once; ++k) limit[k] = own[k] + (others > first + k * 32);  // of equals the later is behind
      const index_t there = min(32, lag - others);
#pragma unroll 8
      for (index_t j = 0; j < there; ++j) {
        const int other = ranked_by[others + j];
#pragma unroll
        for (int k = 0; k < at_once; ++k) behind[k] += is_less(other, limit[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      behind[k] += __popc(__match_any_sync(~0u, own[k]) & (~1u << lane));  // equals among the warp's own
      const index_t i = first + k * 32 + lane;
      if (i < lag) out[i] = own[k] >= 0 ? scorer.ranked(behind[k]) : nanf("");
    }
  }
}

/// Scores a run of `count` measured partitions, a warp each.
template <class Scorer>
__device__ void rank_run(const Scorer& scorer, float* keys, float* values, index_t count, float* out) {
  const index_t lag = scorer.lag;
  for (index_t i = threadIdx.x / 32; i < count; i += index_t(blockDim.x) / 32) {
    halve_softmax(keys + i * lag, lag);
    halve_softmax(values + i * lag, lag);
    rank_partition(scorer, keys + i * lag, values + i * lag, out + i * lag);
  }
}

/// Scores the slots that no partition ranks, of `ranked` that others do, by all blocks of a row.
template <class Scorer>
__device__ void score_outside(const Scorer& scorer, index_t stored, index_t ranked, float* out) {
  for (index_t i = index_t(blockIdx.x * blockDim.x + threadIdx.x); i < stored - ranked;
       i += index_t(gridDim.x * blockDim.x)) {
    const index_t slot = i < scorer.sinks ? i : i + ranked;
    out[slot] = scorer.outside(slot, stored);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
