// Ranks of a partition's slots by how much they spread, on the GPU.
#pragma once

#include <cstdint>

#include "../../../../concepts/scorer.hpp"
#include "../../device/warp.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Replaces a partition's spreads by half of their softmax. One warp calls it.
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

/// The key that a slot is ranked by. Sums are not negative, so their bits have the same order. NaN has the key -1.
__device__ inline int spread_key(float sum) { return sum == sum ? __float_as_int(sum) : -1; }
/// x < y as 0 or 1, in two instructions; keys are less than 2^31 apart.
__device__ inline int is_less(int x, int y) { return int(unsigned(x - y) >> 31); }

/// Writes the scores of a partition's slots: how many slots rank behind each. One warp calls it. Overwrites `values`
/// with the ranking keys.
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
      const index_t there = (min)(32, lag - others);
#pragma unroll 8
      for (index_t j = 0; j < there; ++j) {
        const int other = ranked_by[others + j];
#pragma unroll
        for (int k = 0; k < at_once; ++k) behind[k] += is_less(other, limit[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < at_once; ++k) {
      behind[k] += __popc(__match_any_sync(~0u, own[k]) & (~1u << lane));  // equal keys of the warp's lanes
      const index_t i = first + k * 32 + lane;
      if (i < lag) out[i] = own[k] >= 0 ? scorer.ranked(behind[k]) : nanf("");
    }
  }
}

/// Partitions of at most `max_sorted` slots fit into a warp's registers: `slots_each` side by side in every lane.
inline constexpr index_t max_sorted = 128;
inline constexpr int slots_each = max_sorted / 32;

/// The same for spreads in registers. NaN is ignored.
__device__ inline void halve_softmax(float (&spreads)[slots_each]) {
  float top = -infinity, total = 0;
#pragma unroll
  for (const float x : spreads) top = x < infinity ? fmaxf(top, x) : top;
  top = warp_max(top);
#pragma unroll
  for (float& x : spreads) {
    x = x < infinity ? expf(x - top) : nanf("");
    total += x == x ? x : 0.0f;
  }
  total = warp_sum(total);
#pragma unroll
  for (float& x : spreads) x = x / total / 2;
}

/// Sorts a warp's numbers in ascending order by Batcher's bitonic network. Number lane * slots_each + i is the lane's
/// i-th.
__device__ inline void sort_in_warp(std::uint64_t (&x)[slots_each]) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int run = 2; run <= int(max_sorted); run *= 2) {
#pragma unroll
    for (int step = run / 2; step > 0; step /= 2) {
      if (step >= slots_each) {
        const bool ascends = run == int(max_sorted) || (lane & (run / slots_each)) == 0;
        const bool takes_less = ((lane & (step / slots_each)) == 0) == ascends;
#pragma unroll
        for (std::uint64_t& own : x) {
          const std::uint64_t other = __shfl_xor_sync(~0u, own, step / slots_each);
          own = (other < own) == takes_less ? other : own;
        }
      } else {
#pragma unroll
        for (int i = 0; i < slots_each; ++i) {
          if (i & step) continue;
          const bool ascends = run < slots_each ? (i & run) == 0 : (lane & (run / slots_each)) == 0;
          const std::uint64_t low = x[i], high = x[i + step];
          const bool turned = (high < low) == ascends;
          x[i] = turned ? high : low, x[i + step] = turned ? low : high;
        }
      }
    }
  }
}

/// rank_partition for at most `max_sorted` slots, from the measured spreads. Comparing each slot with every other took
/// twice the instructions: 163 us for 8 x 128K, where this takes 150 (H200, CUDA 13.0).
template <class Scorer>
__device__ void rank_by_sorting(const Scorer& scorer, const float* keys, const float* values, float* out) {
  const index_t first = index_t(threadIdx.x) % 32 * slots_each;
  float of_keys[slots_each], of_values[slots_each];
#pragma unroll
  for (index_t i = 0; i < slots_each; ++i) {
    const bool there = first + i < scorer.lag;
    of_keys[i] = there ? keys[first + i] : infinity, of_values[i] = there ? values[first + i] : infinity;
  }
  halve_softmax(of_keys);
  halve_softmax(of_values);
  // A slot's key; of equal keys the later slot comes first. Slots behind the end come last.
  std::uint64_t sorted[slots_each];
#pragma unroll
  for (index_t i = 0; i < slots_each; ++i) {
    const unsigned key = first + i < scorer.lag ? unsigned(spread_key(of_keys[i] + of_values[i]) + 1) : ~0u;
    sorted[i] = std::uint64_t(key) << 32 | unsigned(max_sorted - 1 - (first + i));
  }
  sort_in_warp(sorted);
#pragma unroll
  for (index_t i = 0; i < slots_each; ++i) {
    const index_t slot = max_sorted - 1 - index_t(unsigned(sorted[i]));
    if (slot < scorer.lag) out[slot] = sorted[i] >> 32 ? scorer.ranked(first + i) : nanf("");
  }
}

/// Scores a run of `count` measured partitions, one warp each.
template <class Scorer>
__device__ void rank_run(const Scorer& scorer, float* keys, float* values, index_t count, float* out) {
  const index_t lag = scorer.lag;
  for (index_t i = threadIdx.x / 32; i < count; i += index_t(blockDim.x) / 32) {
    float *own_keys = keys + i * lag, *own_values = values + i * lag;
    if (lag <= max_sorted) {
      rank_by_sorting(scorer, own_keys, own_values, out + i * lag);
      continue;
    }
    halve_softmax(own_keys, lag);
    halve_softmax(own_values, lag);
    rank_partition(scorer, own_keys, own_values, out + i * lag);
  }
}

/// Scores the slots that no partition ranks; partitions rank the first `ranked` slots. All blocks of a row call it.
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
