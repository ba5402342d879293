// Scoring, first pass by products of four warps at a time (wgmma): the log-sum-exps of up to 64 query rows.
#pragma once

#include "../../device/barrier.cuh"
#include "score_lse.cuh"
#include "wide_keys.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Groups of four warps hold all query rows in registers, 16 a warp, and keys stream through a ring of each group. A
/// group takes every fourth split of its block's share. No other group works on that split, so its tokens are summed in
/// one order whatever the length or the batch.
template <class View>
struct wide_lse_kernel {
  using T = typename View::element_type;
  using problem_type = score_problem<View>;
  using wide = wide_product<T>;
  static constexpr int D = View::k_dim, groups = 4, threads = groups * 128, rows_held = 64, tile = 64, split_tiles = 4;
  static constexpr int stages = 3, stage_bytes = tile * D * 2, align = 1024;
  static constexpr index_t split = tile * split_tiles;

  static std::size_t shared_bytes(index_t rows) {
    return std::size_t(align + groups * stages * stage_bytes) + std::size_t(rows) * sizeof(index_t);
  }

  /// Of query rows lane / 4 + {0, 8}, over the tokens that this lane has seen.
  struct running {
    float max[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0, 0};
    __device__ bool poisoned() const {
      return !(sum[0] < infinity) || !(sum[1] < infinity) || max[0] == infinity || max[1] == infinity;
    }
  };

  /// Adds the products s of 64 tokens. `Careful` masks, caps and skips logits that are NaN. For other logits both
  /// variants give the same bits.
  template <bool Careful>
  __device__ __forceinline__ static void add(const problem_type& p, const scored_head& at, float scale,
                                             index_t first_query, index_t first_token, typename wide::sums& s, int lane,
                                             running& state) {
    const bool capped = p.rule.soft_cap > 0;
    const float factor = Careful && capped ? log2e : scale * log2e;
    if constexpr (Careful) {
      const index_t positions[2] = {at.position_of(first_query + lane / 4), at.position_of(first_query + 8 + lane / 4)};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const index_t token = first_token + n * 8 + lane % 4 * 2 + j;
          const bool stored = token < at.tokens;
          const index_t key_position = stored ? p.view.position(at.sequence, at.head, token) : 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& x = s[n][r * 2 + j];
            if (capped) x = capped_logit(p.rule, x * scale);
            x = stored && p.rule.visible(positions[r], key_position) && x < infinity ? x : -infinity;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -infinity;
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(s[n][r * 2], s[n][r * 2 + 1]));
      top = fmaxf(state.max[r], top * factor);
      state.sum[r] *= power_of_two(state.max[r] - top);
      state.max[r] = top;
      float sum[4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float two =
            power_of_two(fmaf(s[n][r * 2], factor, -top)) + power_of_two(fmaf(s[n][r * 2 + 1], factor, -top));
        sum[n / 2] = n % 2 ? sum[n / 2] + two : two;
      }
      state.sum[r] += (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
  }

  __device__ __forceinline__ static void multiply(const std::uint32_t (&q)[D / 16][4], std::uint32_t keys,
                                                  typename wide::sums& s) {
    wide::begin();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      wide::multiply(s, q[step],
                     wide::operand(keys + std::uint32_t(step % 4 * 32) + wide::offset(tile, 0, step / 4 * 8)),
                     step > 0);
    }
    wide::commit();
    wide::finish(s);
  }

  /// Adds the products of tile `t`. `sure`: every row sees all of the tile, and nothing is capped.
  __device__ __forceinline__ static void add_tile(const problem_type& p, const scored_head& at, float scale,
                                                  index_t first_query, index_t t, bool sure, typename wide::sums& s,
                                                  int lane, running& state) {
    const bool plain = sure || (p.rule.soft_cap <= 0 && (t + 1) * tile <= at.tokens &&
                                token_span::read(p.view, at, t * tile, tile)
                                    .seen_by_all(p.rule, at.first_position, at.position_of(at.query_rows - 1)));
    const running previous = state;
    if (plain) add<false>(p, at, scale, first_query, t * tile, s, lane, state);
    if (__any_sync(~0u, !plain || state.poisoned())) {
      state = previous;
      add<true>(p, at, scale, first_query, t * tile, s, lane, state);
    }
  }

  /// A warp's 16 query rows, as products take them.
  __device__ __forceinline__ static void load_queries(const problem_type& p, const scored_head& at, index_t first_query,
                                                      int lane, std::uint32_t (&q)[D / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const index_t query = first_query + r * 8 + lane / 4;
      const bool valid = query < at.query_rows;
      const T* from = at.query(p, valid ? query : 0);
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        q[i / 2][i % 2 * 2 + r] = valid ? *reinterpret_cast<const std::uint32_t*>(from + i * 8 + lane % 4 * 2) : 0u;
      }
    }
  }

  /// The four lanes of a query row merge in a fixed order.
  __device__ __forceinline__ static void join_lanes(running& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) {
        const float max = __shfl_xor_sync(~0u, state.max[r], step), sum = __shfl_xor_sync(~0u, state.sum[r], step);
        join_sums(state.max[r], state.sum[r], max, sum);
      }
    }
  }

  /// Ends a split.
  __device__ static void flush(const lse_partials& out, index_t row, const scored_head& at, index_t first_query,
                               index_t split_index, int lane, running& state) {
    join_lanes(state);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const index_t query = first_query + r * 8 + lane / 4;
      if (lane % 4 == 0 && query < at.query_rows)
        out.splits(row, query)[split_index] = make_float2(state.max[r], state.sum[r]);
    }
    state = {};
  }

  __device__ static void run(const problem_type& p, const lse_partials& out) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    __shared__ block_scan<threads, index_t> scan;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const std::uint32_t begin_of_memory = (shared_address(wide_memory) + align - 1) / align * align;
    const std::uint32_t ring = begin_of_memory + std::uint32_t(group * stages * stage_bytes);
    auto* ends = reinterpret_cast<index_t*>(wide_memory + (begin_of_memory - shared_address(wide_memory)) +
                                            groups * stages * stage_bytes);
    const auto line = work_line::plan(
        ends, scan, p.view.sequences * p.view.kv_heads, index_t(blockIdx.y), index_t(gridDim.y), [&](index_t row) {
          return ceil_div((min)(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads), out.capacity), split);
        });
    const index_t first_query = warp * 16;
    const float scale = p.rule.scale_for(D);
    index_t begin = line.begin;
    for (index_t row = line.first_row; begin < line.end; ++row) {
      const index_t stop = (min)(line.end, line.ends[row]), row_begin = line.row_begin(row);
      if (stop <= begin) continue;
      const auto at = scored_head::find(p, row, out.capacity);
      const index_t first_split = begin - row_begin + group, last_split = stop - row_begin;
      begin = stop;
      if (at.query_rows == 0 || all_rows_given<rows_held>(p, at, 0)) continue;
      const index_t oldest = at.first_position, newest = at.position_of(at.query_rows - 1);

      std::uint32_t q[D / 16][4];
      load_queries(p, at, first_query, lane, q);
      // Tile i of this group; beyond the end: at or behind last_tile.
      const index_t last_tile = (min)(last_split * split_tiles, ceil_div(at.tokens, index_t(tile)));
      const auto tile_of = [&](index_t i) {
        return (first_split + i / split_tiles * groups) * split_tiles + i % split_tiles;
      };
      const index_t sure_tiles = slots_seen_by_all(p, at) / tile;
      const auto seen = [&](index_t t) {
        return token_span::read(p.view, at, t * tile, tile).seen_by_any(p.rule, oldest, newest);
      };
      const wide_keys<View, tile> keys(p.view, at, lane);
      const auto bring = [&](index_t i) {
        const index_t t = tile_of(i);
        const std::uint32_t to = ring + std::uint32_t(i % stages * stage_bytes + warp * 16 * 128);
        if (t < (min)(sure_tiles, last_tile)) {
          keys.bring_whole(p.view, at, t * tile + warp * 16, to);
        } else if (t < last_tile && seen(t)) {
          keys.bring(p.view, at, t * tile + warp * 16, to);
        }
        commit_copies();
      };
      running state;
      wait_at(1 + group, 128);  // the ring is free: all warps of the group have finished the previous row
      for (int s = 0; s < stages - 1; ++s) bring(s);
      for (index_t i = 0; tile_of(i) < last_tile; ++i) {
        const index_t t = tile_of(i);
        wait_copies<stages - 2>();
        wide::publish();
        wait_at(1 + group, 128);
        bring(i + stages - 1);
        const bool sure = t < sure_tiles;
        if (sure || seen(t)) {
          typename wide::sums s;
          multiply(q, ring + std::uint32_t(i % stages * stage_bytes), s);
          add_tile(p, at, scale, first_query, t, sure, s, lane, state);
        }
        if (i % split_tiles == split_tiles - 1 || t + 1 == last_tile) {
          flush(out, row, at, first_query, t / split_tiles, lane, state);
        }
      }
      wait_copies<0>();
    }
  }
};

template <class View>
__global__ void __launch_bounds__(compiled_for_hopper ? 512 : 32, 1)
    wide_lse_entry(const __grid_constant__ score_problem<View> problem, lse_partials out) {
  if constexpr (compiled_for_hopper) wide_lse_kernel<View>::run(problem, out);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
