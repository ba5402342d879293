// Which groups of one vector's channels stay, chosen by one warp.
#pragma once

#include "../../../../math/ordered.hpp"
#include "packed_view.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int most_group_words = largest_head_dim / 32;

/// chosen = bits of the `wanted` of `groups` groups of `group` channels of `row` with most energy, alike in all lanes; ties to the lower group,
/// NaN last.
__device__ inline void choose_groups(const float* row, int groups, int group, int wanted,
                                     std::uint32_t (&chosen)[most_group_words]) {
  constexpr int most = most_group_words;
  const int lane = int(threadIdx.x) % 32;
  std::uint32_t keys[most];
#pragma unroll
  for (int j = 0; j < most; ++j) {
    const int g = j * 32 + lane;
    float energy = 0;
    if (g < groups) {
      for (int c = g * group; c < (g + 1) * group; ++c) energy = __fadd_rn(energy, __fmul_rn(row[c], row[c]));
    }
    keys[j] = g < groups ? ordered_bits(energy) : 0u;  // 0: below every key
  }
  // The wanted-th largest key, bit by bit; of those that equal it the lower groups stay.
  std::uint32_t least = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const std::uint32_t trial = least | (1u << bit);
    int reaching = 0;
#pragma unroll
    for (int j = 0; j < most; ++j) {
      if (j * 32 < groups) reaching += __popc(__ballot_sync(~0u, keys[j] >= trial));
    }
    if (reaching >= wanted) least = trial;
  }
  int above = 0;
#pragma unroll
  for (int j = 0; j < most; ++j) {
    if (j * 32 < groups) above += __popc(__ballot_sync(~0u, keys[j] > least));
  }
  int ties = wanted - above;
#pragma unroll
  for (int j = 0; j < most; ++j) {
    chosen[j] = 0;
    if (j * 32 >= groups) continue;
    const std::uint32_t equal = __ballot_sync(~0u, keys[j] == least && j * 32 + lane < groups);
    const bool stays = keys[j] > least || (((equal >> lane) & 1u) && __popc(equal & ((1u << lane) - 1u)) < ties);
    chosen[j] = __ballot_sync(~0u, stays);
    ties = max(0, ties - __popc(equal));
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
