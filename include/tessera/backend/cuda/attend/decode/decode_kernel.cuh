// The decode attention kernel: one pass over K and V, cut evenly over the machine whatever the lengths.
#pragma once

#include "../../device/launch.cuh"
#include "decode_merge.cuh"
#include "decode_split.cuh"
#include "decode_staging.cuh"
#include "decode_state.cuh"
#include "decode_state_fp8.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View, class Out>
struct decode_kernel : decode_merge<View, Out> {
  using base = decode_merge<View, Out>;
  using base::base;
  using base::first_query, base::group, base::lane, base::memory, base::p, base::parts_at_once, base::query_rows;
  using base::tile, base::tokens, base::used, base::warp;
  using typename base::merge_shares, typename base::segment;
  using T = typename View::element_type;
  using staging_type = decode_staging<View>;
  using state_type = std::conditional_t<decode_format<View>::is_fp8, decode_state_fp8<View>, decode_state<View>>;
  using queries_type = typename state_type::queries;
  static constexpr int D = View::k_dim, stages = base::config::stages;

  /// Straight to registers, ahead of the tiles. Through shared memory, a barrier of the block behind the copies waits
  /// until the slowest warp has issued all of its tiles (slower by 1.8 us, spilled registers included), and one that
  /// only waits for the queries gained nothing and cost 0.8 us in pages (H200, CUDA 13.0, B1 8K).
  __device__ void load_queries(const decode_row& at, queries_type& asked) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t r = first_query + lane / 4 + half * 8;
      const bool valid = r < query_rows;
      const index_t token = small_quotient(r, group);
      asked.load(half, valid ? p.q.row(at.sequence, token, at.head * group + r - token * group) : nullptr, lane);
    }
  }

  /// Positions of the step's first token and of the first and the last token of some.
  struct span_positions {
    index_t step, first, last;
  };
  __device__ index_t position_of(const decode_row& at, index_t token) const {
    return p.view.position(at.sequence, at.head, staging_type::slot_of(at, token));
  }
  __device__ span_positions positions_of(const segment& of) const {
    return {p.first_position[of.at.sequence], position_of(of.at, of.first_tile * tile),
            position_of(of.at, (min)(of.last_tile * tile, of.at.count) - 1)};
  }
  /// Are all tokens between two visible to all query rows? Positions ascend, so the ends tell.
  __device__ bool all_visible(const span_positions& at) const {
    return at.last <= at.step + small_quotient(first_query, group) &&
           (p.rule.sliding_window <= 0 || p.rule.visible(at.step + p.q.tokens - 1, at.first));
  }

  __device__ void read_tiles(const segment& of, const span_positions& ends_at, const queries_type& asked,
                             staging_type& staging, state_type& state) const {
    const float scale = p.rule.scale_for(D);
    const bool uncapped = p.rule.soft_cap <= 0;
    const bool segment_visible = all_visible(ends_at);
    const auto tokens_from = [&](index_t t) { return base::token_of(t); };
    for (index_t t = of.first_tile; t < of.last_tile; ++t) {
      const std::uint32_t here = staging.take();
      const index_t first = base::token_of(t);
      if (first < of.at.count) {
        const index_t held = (min)(index_t(tokens), of.at.count - first);
        bool visible = segment_visible;
        index_t mine = 0;  // the position of token lane % tokens of the tile
        if (!visible) {
          mine = position_of(of.at, first + lane % tokens);
          visible = all_visible({ends_at.step, __shfl_sync(~0u, mine, 0), __shfl_sync(~0u, mine, held - 1)});
        }
        const auto logit_of = [&](int i, int half, float product) {
          const index_t r = first_query + lane / 4 + half * 8, position = __shfl_sync(~0u, mine, i);
          const index_t query_position = ends_at.step + (r < query_rows ? small_quotient(r, group) : 0);
          const bool seen = visible || p.rule.visible(query_position, position);
          return seen && i < held ? quick_cap(p.rule, product * scale) * log2e : -infinity;
        };
        state.read(asked, here, uncapped && visible && held == tokens, !visible, scale * log2e, logit_of, lane);
      }
      __syncwarp();
      staging.put(p.view, of.at, t + stages, of.last_tile, tokens_from, lane);
    }
    state.close();
  }

  /// Asks for the slots of tiles [first, last) before K and V fill the memory's queues, where a slot would wait with
  /// them.
  __device__ void prefetch_indices(const index_t* chosen, index_t first, index_t last, index_t count) const {
    const index_t token = first * tile + index_t(threadIdx.x) * 32;  // 128 bytes a thread
    if (token < (min)(last * tile, count)) prefetch_line(chosen + token);
  }

  /// Which pieces a row has, where every step cuts all rows' tiles evenly.
  struct even_rows {
    even_pieces cut;
    static constexpr bool planned = false;
    __device__ index_t end() const { return cut.begin(index_t(blockIdx.x) + 1); }
    __device__ row_parts parts_of(const segment& of) const {
      const index_t first = cut.piece_of(of.row_begin);
      return {first, cut.piece_of(of.row_end - 1) - first + 1};
    }
  };
  /// The same where a split may have been made ahead: `planned`, this block reads its part of one row.
  struct split_rows {
    even_rows even;
    bool planned;
    row_parts own;
    index_t own_end;
    __device__ index_t end() const { return planned ? own_end : even.end(); }
    __device__ row_parts parts_of(const segment& of) const { return planned ? own : even.parts_of(of); }
  };

  /// Reads this block's piece, which begins with `now`.
  template <class Cut>
  __device__ void run(const Cut& cut, segment now, int* flag, merge_shares& shares) const {
    const index_t end = cut.end();
    staging_type staging(shared_address(memory + warp * warp_bytes<View>(base::config::tuning)));
    const auto tokens_from = [&](index_t t) { return base::token_of(t); };
    bool more = true, first = true;
    index_t arrived_row = 0;
    row_parts arrived{0, 1};
    decode_row arrived_at{};
    span_positions ends_at{};
    queries_type asked;
#pragma unroll 1
    while (true) {
      // A row's first tiles leave before the row before it is done with: its merge costs their latency or less. What is
      // small leaves before them: behind them it would wait until all of them are there.
      if (more) {
        if (now.at.chosen) prefetch_indices(now.at.chosen, now.first_tile, now.last_tile, now.at.count);
        staging.find(p.view, now.at, now.first_tile, now.last_tile, tokens_from, lane);
        load_queries(now.at, asked);
        ends_at = positions_of(now);
        staging.begin(p.view, now.at, now.first_tile, now.last_tile, tokens_from, lane);
      }
      if (!more) break;
      if (arrived.count > 1) {
        base::template merge_parts<parts_at_once>(arrived_at, arrived_row, arrived, flag, shares);
      }
      if (p.chosen.indices && now.row_end < end) {
        // A block that goes on into the next row will find its slots in the L2.
        const index_t tiles = (min)(end, now.next_end) - now.row_end - base::restart;
        prefetch_indices(p.chosen.row(now.row + 1), 0, tiles, (tiles - 1) * tile + 1);
      }
      arrived_row = now.row;
      arrived_at = now.at;
      arrived = cut.parts_of(now);
      {
        state_type state;
        read_tiles(now, ends_at, asked, staging, state);
        state.store(base::outs_of(warp), base::states_of(warp), used, lane);
      }
      __syncthreads();
      base::merge_warps(now, arrived.count == 1);
      if (first && !cut.planned) base::write_empty_rows();
      first = false;
      __syncthreads();
      const index_t begin = now.row_begin + now.last_tile;
      more = begin + base::restart < end;
      if (more) {
        index_t row = now.row + 1;
        while (base::ends[row] <= begin) ++row;
        now = base::segment_at(row, begin, end);
      }
    }
    // The last row's parts, behind the loop, whose registers are free: many parts are read at once.
    if (base::has_many(arrived)) {
      base::template merge_parts<base::many_parts_at_once>(arrived_at, arrived_row, arrived, flag, shares);
    } else if (arrived.count > 1) {
      base::template merge_parts<parts_at_once>(arrived_at, arrived_row, arrived, flag, shares);
    }
  }
};

template <class View, class Out, decode_split Split>
__global__ void __launch_bounds__(decode_kernel<View, Out>::threads, decode_kernel<View, Out>::config::tuning.blocks)
    decode_entry(const __grid_constant__ decode_problem<View, Out> problem,
                 const __grid_constant__ decode_scratch scratch) {
  using kernel = decode_kernel<View, Out>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ index_t ends[most_rows];
  __shared__ block_scan<kernel::threads, index_t> scan;
  __shared__ int flag;
  __shared__ typename kernel::merge_shares shares;
  kernel block(problem, scratch, memory, ends);
  typename kernel::segment first{};
  block.touch_parameters(scan.warp_total);
  wait_for_earlier();  // lengths, K, V, queries, and the workspace that the step before may still merge in
  let_later_begin();   // now or just before the merges: the same times
  if constexpr (Split == decode_split::ahead) {
    row_parts own{};
    const bool planned = block.find_split(first, own);
    if (planned && (own.count == 0 || first.at.count == 0)) {
      if (own.count > 0) block.write_empty_row(first.at);
      return;
    }
    const even_pieces cut = planned ? even_pieces(1, 1) : block.plan(first, scan);
    if (!planned && (index_t(blockIdx.x) >= cut.count || cut.units == 0)) {
      __syncthreads();
      block.write_empty_rows();
      return;
    }
    block.run(typename kernel::split_rows{{cut}, planned, own, first.last_tile}, first, &flag, shares);
  } else {
    const even_pieces cut = block.plan(first, scan);
    if (index_t(blockIdx.x) >= cut.count || cut.units == 0) {
      __syncthreads();
      block.write_empty_rows();
      return;
    }
    block.run(typename kernel::even_rows{cut}, first, &flag, shares);
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
