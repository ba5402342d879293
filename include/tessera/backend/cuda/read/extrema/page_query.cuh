// What the queries of one kv_head's group ask of an estimate: channels, sides and scales, found by every thread block.
#pragma once

#include "../../../../concepts/scorer.hpp"
#include "../../../../math/ordered.hpp"
#include "page_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

/// Sums of a warp, the same on every lane and in the same order every time.
__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}
/// Two at once: neither waits for the other's shuffles.
__device__ inline float2 warp_sum(float2 value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float x = __shfl_xor_sync(~0u, value.x, step), y = __shfl_xor_sync(~0u, value.y, step);
    value.x += x, value.y += y;
  }
  return value;
}
/// The largest of a warp, none of them NaN.
__device__ inline float warp_max(float value) {
  const int bits = __float_as_int(value), most = __reduce_max_sync(~0u, bits >= 0 ? bits : bits ^ 0x7fffffff);
  return __int_as_float(most >= 0 ? most : most ^ 0x7fffffff);
}

template <int D>
struct page_query_storage {
  alignas(16) unsigned weight[D];  // ordered bits of the sum of |q| over the usable rows
  float total[D];                  // sum of q over them
  index_t place[D];                // of a chosen channel, from 0; otherwise at least the number of chosen ones
  float scale[most_query_rows];
  bool usable[most_query_rows];  // whether every element of the row is finite; another row says nothing
  slot_run runs[most_step_tokens];
};

/// Reads the rows of one group into `q` [rows, D] and fills the storage, with the CPU's choice of channels: its sums
/// are made in the order of the rows. Synchronises the block behind itself.
template <int Threads, class View, class Scorer>
__device__ void read_page_query(page_query_storage<View::k_dim>& s, typename View::element_type* q,
                                const page_problem<View>& p, const Scorer& scorer, index_t channels, index_t sequence,
                                index_t head, index_t n) {
  constexpr int D = View::k_dim, chunks = D / 8, warps = Threads / 32;
  constexpr int parts = 2 * D <= Threads ? 2 : 1;  // threads that rank one channel
  const int thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const index_t group = p.q.heads / p.view.kv_heads, rows = p.q.tokens * group;
  // All that must come from memory is asked for before the first of it is used.
  const auto chunk_of = [&](int i) {
    const index_t r = i / chunks;
    const auto* from = p.q.row(sequence, r / group, head * group + r % group) + i % chunks * 8;
    return __ldg(reinterpret_cast<const uint4*>(from));
  };
  const uint4 mine = thread < rows * chunks ? chunk_of(thread) : make_uint4(0, 0, 0, 0);
  const index_t position = p.first_position[sequence];
  const index_t last = p.view.positions && n > 0 ? p.view.position(sequence, head, n - 1) : n - 1;
  if (thread < rows * chunks) reinterpret_cast<uint4*>(q)[thread] = mine;
  for (int i = thread + Threads; i < rows * chunks; i += Threads) reinterpret_cast<uint4*>(q)[i] = chunk_of(i);
  __syncthreads();
  const auto sum_rows = [&](bool all) {
    for (int d = thread; d < D; d += Threads) {
      float weight = 0, total = 0;
      for (index_t r = 0; r < rows; ++r) {
        const float x = float(q[r * D + d]);
        if (all || s.usable[r]) weight += std::abs(x), total += x;
      }
      s.weight[d] = ordered_bits(weight);
      s.total[d] = total;
    }
  };
  sum_rows(true);
  bool bad = false;
  for (index_t r = warp; r < rows; r += warps) {
    bool finite = true;
    for (int d = lane; d < D; d += 32) finite &= is_finite(float(q[r * D + d]));
    finite = __all_sync(~0u, finite);
    bad |= !finite;
    if (lane == 0) s.usable[r] = finite;
  }
  if (__syncthreads_or(bad)) {  // again without the rows that are not finite
    sum_rows(false);
    __syncthreads();
  }
  if (channels == D) {
    for (int d = thread; d < D; d += Threads) s.place[d] = d;
  } else {
    // A channel's place is the number of those before it. Places need not ascend by channel.
    const int part = thread % parts;
    for (int d = thread / parts; d < (D + 31) / 32 * 32; d += Threads / parts) {
      int before = 0;
      if (d < D) {
        // Of equal ones the lower channel comes first: those below d count from `own` on, the others from own + 1.
        const unsigned own = s.weight[d];
        const int begin = part * (D / parts);
        for (int j = begin; j < begin + D / parts; j += 4) {
          const uint4 others = *reinterpret_cast<const uint4*>(s.weight + j);
          if (j / 4 == d / 4) {
            before +=
                (others.x > own || (others.x == own && j < d)) + (others.y > own || (others.y == own && j + 1 < d)) +
                (others.z > own || (others.z == own && j + 2 < d)) + (others.w > own || (others.w == own && j + 3 < d));
          } else {
            const unsigned least = own + (j > d);
            before += (others.x >= least) + (others.y >= least) + (others.z >= least) + (others.w >= least);
          }
        }
      }
      if (parts == 2) before += __shfl_xor_sync(~0u, before, 1);
      if (d < D && part == 0) s.place[d] = before;
    }
  }
  __syncthreads();
  for (index_t r = warp; r < rows; r += warps) {
    float chosen = 0, whole = 0;  // summed alike: equal to the bit where all channels are chosen
    for (int d = lane; d < D; d += 32) {
      const float x = std::abs(float(q[r * D + d]));
      whole += x;
      chosen += s.place[d] < channels ? x : 0.0f;
    }
    const float scale = scorer.row_scale(p.rule.scale_for(D), warp_sum(chosen), warp_sum(whole));
    if (lane == 0) s.scale[r] = scale;
  }
  for (index_t t = warps - 1 - warp; t < p.q.tokens; t += warps) {
    const slot_run run = visible_run(p.view, sequence, head, p.rule, n, last, position + t, lane);
    if (lane == 0) s.runs[t] = run;
  }
  __syncthreads();
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
