// Scoring, first pass: the log-sum-exp of every query row over the keys that it sees.
#pragma once

#include <cfloat>

#include "../../../../math/softmax_state.hpp"
#include "../../device/kernel.cuh"
#include "../../device/softmax.cuh"
#include "../score_problem.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Softmax states of runs of `split` tokens, [rows, query rows, slots]: the base-2 maximum and the sum.
struct lse_partials {
  float2* state;
  index_t query_rows, slots, split, capacity;

  __device__ float2* splits(index_t row, index_t query_row) const {
    return state + (offset_t(row) * query_rows + query_row) * slots;
  }
};

/// Queries stay in registers and keys stream through a ring in shared memory.
///
/// RowWarps warps hold 16 * RowTiles query rows each. With fewer row warps than warps, the others read other tokens of
/// the tile. A split's tokens are summed in one order whatever the length, the batch or the chunk of queries, so equal
/// rows give equal bits in every call.
template <class View, int RowWarps, int RowTiles, int Stages>
struct lse_kernel {
  using T = typename View::element_type;
  using problem_type = score_problem<View>;
  static constexpr int D = View::k_dim, warps = 4, threads = warps * 32, tile = 64;
  static constexpr int token_warps = warps / RowWarps, warp_tokens = tile / token_warps;
  static constexpr int rows_held = RowWarps * RowTiles * 16;
  static_assert(rows_held <= threads, "tessera: a thread looks at one row of its block");
  static constexpr int pairs = warp_tokens >= 32 ? 2 : 1;  // of 16 tokens between two updates of the maximum
  static constexpr int row_bytes = score_rows_staged<D>().bytes(), stage_bytes = tile * row_bytes;
  static constexpr int ring_bytes = Stages * stage_bytes;

  /// Maximum and sum of query rows lane / 4 + {0, 8} of each row tile, over this lane's tokens.
  struct running {
    float max[RowTiles * 2], sum[RowTiles * 2];
    __device__ void clear() {
#pragma unroll
      for (int i = 0; i < RowTiles * 2; ++i) max[i] = -FLT_MAX, sum[i] = 0;
    }
    /// Whether a logit was NaN or +infinity.
    __device__ bool poisoned() const {
      bool found = false;
#pragma unroll
      for (int i = 0; i < RowTiles * 2; ++i) found |= !(sum[i] < infinity) || max[i] == infinity;
      return found;
    }
  };

  /// `Careful` masks, caps, and skips logits that are NaN. For other logits both variants give the same bits.
  template <bool Careful>
  __device__ static void consume(const problem_type& p, const scored_head& at,
                                 const std::uint32_t (&q)[RowTiles][D / 16][4], index_t first_query,
                                 index_t first_token, std::uint32_t shared, int lane, running& state) {
    const bool capped = p.rule.soft_cap > 0;
    const float scale = p.rule.scale_for(D), factor = Careful && capped ? log2e : scale * log2e;
    const int matrix = lane / 8, in_matrix = lane % 8;
#pragma unroll 1
    for (int run = 0; run < warp_tokens; run += pairs * 16) {
      float s[RowTiles][pairs * 2][4] = {};
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int pair = 0; pair < pairs; ++pair) {
          std::uint32_t b[4];
          const int token = run + pair * 16 + matrix / 2 * 8 + in_matrix;
          load_matrices(b, shared + score_rows_staged<D>().offset(token, step * 2 + matrix % 2));
#pragma unroll
          for (int m = 0; m < RowTiles; ++m) {
            multiply<T>(s[m][pair * 2], q[m][step], b[0], b[1]);
            multiply<T>(s[m][pair * 2 + 1], q[m][step], b[2], b[3]);
          }
        }
      }
      if constexpr (Careful) {
#pragma unroll
        for (int n = 0; n < pairs * 2; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const index_t token = first_token + run + n * 8 + lane % 4 * 2 + j;
            const bool stored = token < at.tokens;
            const index_t key_position = stored ? p.view.position(at.sequence, at.head, token) : 0;
#pragma unroll
            for (int r = 0; r < RowTiles * 2; ++r) {
              float& x = s[r / 2][n][r % 2 * 2 + j];
              const index_t query_position = at.position_of(first_query + r / 2 * 16 + r % 2 * 8 + lane / 4);
              if (capped) x = p.rule.cap(x * scale);
              x = stored && p.rule.visible(query_position, key_position) && x < infinity ? x : -infinity;
            }
          }
        }
      }
#pragma unroll
      for (int r = 0; r < RowTiles * 2; ++r) {
        float top = -infinity;
#pragma unroll
        for (int n = 0; n < pairs * 2; ++n) {
          top = fmaxf(top, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
        }
        // Always rescaled: a branch that skips it while the maximum is unchanged gained nothing (H200, CUDA 13.0: 156
        // us both).
        top = fmaxf(state.max[r], top * factor);
        state.sum[r] *= power_of_two(state.max[r] - top);
        state.max[r] = top;
        float sum[pairs * 2];
#pragma unroll
        for (int n = 0; n < pairs * 2; ++n) {
          sum[n] = power_of_two(fmaf(s[r / 2][n][r % 2 * 2], factor, -state.max[r])) +
                   power_of_two(fmaf(s[r / 2][n][r % 2 * 2 + 1], factor, -state.max[r]));
        }
#pragma unroll
        for (int n = 0; n < pairs * 2; n += 2) state.sum[r] += sum[n] + sum[n + 1];
      }
    }
  }

  /// Ends a split: first lanes, then warps, merge in a fixed order.
  __device__ static void flush(const lse_partials& out, index_t row, const scored_head& at, index_t first_query,
                               index_t split, float2 (*meeting)[16], int warp, int lane, running& state) {
#pragma unroll
    for (int r = 0; r < RowTiles * 2; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float max = __shfl_xor_sync(~0u, state.max[r], step), sum = __shfl_xor_sync(~0u, state.sum[r], step);
        join_sums(state.max[r], state.sum[r], max, sum);
      }
      const int held = r / 2 * 16 + r % 2 * 8 + lane / 4;
      if constexpr (token_warps > 1) {
        if (lane % 4 == 0) meeting[warp][held] = make_float2(state.max[r], state.sum[r]);
      } else {
        const index_t query = first_query + held;
        if (lane % 4 == 0 && query < at.query_rows)
          out.splits(row, query)[split] = make_float2(state.max[r], state.sum[r]);
      }
    }
    if constexpr (token_warps > 1) {
      __syncthreads();
      if (threadIdx.x < 16 && first_query + index_t(threadIdx.x) < at.query_rows) {
        float2 all = meeting[0][threadIdx.x];
        for (int w = 1; w < warps; ++w) join_sums(all.x, all.y, meeting[w][threadIdx.x].x, meeting[w][threadIdx.x].y);
        out.splits(row, first_query + index_t(threadIdx.x))[split] = all;
      }
      __syncthreads();
    }
    state.clear();
  }

  __device__ static void run(const problem_type& p, const lse_partials& out) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float2 meeting[warps][16];
    __shared__ block_scan<threads, index_t> scan;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const index_t first_of_block = index_t(blockIdx.x) * rows_held;
    const index_t first_query = first_of_block + (RowWarps > 1 ? warp * RowTiles * 16 : 0);
    const int first_of_warp = RowWarps > 1 ? 0 : warp * warp_tokens;  // token of the tile
    const index_t split_tiles = out.split / tile;
    const auto line = work_line::plan(
        reinterpret_cast<index_t*>(memory + ring_bytes), scan, p.view.sequences * p.view.kv_heads, index_t(blockIdx.y),
        index_t(gridDim.y), [&](index_t row) {
          return ceil_div((min)(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads), out.capacity), out.split);
        });
    const std::uint32_t ring = shared_address(memory);
    index_t begin = line.begin;
    for (index_t row = line.first_row; begin < line.end; ++row) {
      const index_t stop = (min)(line.end, line.ends[row]), row_begin = line.row_begin(row);
      if (stop <= begin) continue;
      const auto at = scored_head::find(p, row, out.capacity);
      const index_t first_tile = (begin - row_begin) * split_tiles;
      const index_t last_tile = (min)((stop - row_begin) * split_tiles, ceil_div(at.tokens, tile));
      begin = stop;
      if (first_of_block >= at.query_rows || all_rows_given<rows_held>(p, at, first_of_block)) continue;
      const index_t oldest = at.position_of(first_of_block);
      const index_t newest = at.position_of((min)(first_of_block + rows_held, at.query_rows) - 1);

      std::uint32_t q[RowTiles][D / 16][4];
#pragma unroll
      for (int r = 0; r < RowTiles * 2; ++r) {
        const index_t query = first_query + r / 2 * 16 + r % 2 * 8 + lane / 4;
        const bool valid = query < at.query_rows;
        const T* from = valid ? at.query(p, query) : nullptr;
#pragma unroll
        for (int i = 0; i < D / 8; ++i) {
          q[r / 2][i / 2][i % 2 * 2 + r % 2] =
              valid ? *reinterpret_cast<const std::uint32_t*>(from + i * 8 + lane % 4 * 2) : 0u;
        }
      }
      const auto put = [&](index_t t) {
        if (t < last_tile && token_span::read(p.view, at, t * tile, tile).seen_by_any(p.rule, oldest, newest)) {
          const index_t mine = t * tile + warp * (tile / warps);
          stage_keys<tile / warps>(p.view, at, mine,
                                   ring + std::uint32_t(t % Stages * stage_bytes + warp * (tile / warps) * row_bytes),
                                   lane);
        }
        commit_copies();
      };
      running state;
      state.clear();
      __syncthreads();  // the ring is free: all warps have finished the previous row
      for (int s = 0; s < Stages - 1; ++s) put(first_tile + s);
      for (index_t t = first_tile; t < last_tile; ++t) {
        wait_copies<Stages - 2>();
        __syncthreads();
        put(t + Stages - 1);
        const auto span = token_span::read(p.view, at, t * tile, tile);
        if (span.seen_by_any(p.rule, oldest, newest) && first_query < at.query_rows) {
          const bool plain =
              p.rule.soft_cap <= 0 && (t + 1) * tile <= at.tokens && span.seen_by_all(p.rule, oldest, newest);
          const std::uint32_t keys = ring + std::uint32_t(t % Stages * stage_bytes + first_of_warp * row_bytes);
          const index_t first_token = t * tile + first_of_warp;
          const running before = state;
          if (plain) consume<false>(p, at, q, first_query, first_token, keys, lane, state);
          if (__any_sync(~0u, !plain || state.poisoned())) {
            state = before;
            consume<true>(p, at, q, first_query, first_token, keys, lane, state);
          }
        }
        if ((t + 1) % split_tiles == 0 || t + 1 == last_tile) {
          flush(out, row, at, first_query, t / split_tiles, meeting, warp, lane, state);
        }
      }
      wait_copies<0>();
    }
  }
};

template <class View, int RowWarps, int RowTiles, int Stages>
__global__ void __launch_bounds__(128, View::k_dim <= 128 ? 3 : 2)
    lse_entry(const __grid_constant__ score_problem<View> problem, lse_partials out) {
  lse_kernel<View, RowWarps, RowTiles, Stages>::run(problem, out);
}

/// Merges a row's splits in order and adds its sink, or uses the engine's log-sum-exp. One warp per query row. lse
/// [rows, query rows], natural log.
template <class View>
__global__ void __launch_bounds__(128)
    merge_lse_entry(const __grid_constant__ score_problem<View> p, lse_partials partials, float* lse) {
  wait_for_earlier();
  let_later_begin();
  const offset_t item = offset_t(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const index_t row = index_t(item / partials.query_rows), query = index_t(item % partials.query_rows);
  if (row >= p.view.sequences * p.view.kv_heads) return;
  const auto at = scored_head::find(p, row, partials.capacity);
  const float given = query < at.query_rows ? at.given_lse(p, query) : infinity;
  if (given < infinity) {
    if (lane == 0) lse[item] = given;
    return;
  }
  const index_t used = query < at.query_rows ? ceil_div(at.tokens, partials.split) : 0;
  const float2* state = partials.splits(row, query);
  float top = -FLT_MAX, sum = 0;
  for (index_t i = lane; i < used; i += 32) top = fmaxf(top, state[i].x);
  top = warp_max(top);
  for (index_t i = lane; i < used; i += 32) sum += state[i].y * power_of_two(state[i].x - top);
  sum = warp_sum(sum);
  if (lane != 0) return;
  softmax_state total{sum > 0 ? top * ln2 : -infinity, sum};
  if (p.rule.sink_logits && query < at.query_rows) {
    total.merge({p.rule.sink_logits[at.head * at.group + query % at.group], 1.0f});
  }
  lse[item] = total.log_sum_exp();
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
