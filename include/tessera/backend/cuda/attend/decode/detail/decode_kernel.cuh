// The decode attention kernel: one pass over K and V, cut evenly among the blocks whatever the lengths.
#pragma once

#include "../../../device/barrier.cuh"
#include "../../../device/kernel.cuh"
#include "../../../device/mma.cuh"
#include "../../../device/warp.cuh"
#include "decode_plan.cuh"
#include "decode_staging.cuh"
#include "decode_state_groups.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// How a row's parts become its output: first the parts of a block's warps, then the parts of several blocks.

namespace detail {

template <class View, class Out>
struct decode_merge : decode_block<View, Out> {
  using base = decode_block<View, Out>;
  using base::base;
  using base::ends, base::first_query, base::group, base::lane, base::memory, base::p, base::query_rows, base::rows;
  using base::scratch, base::threads, base::used, base::warp, base::warps;
  using typename base::segment;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  /// How many parts of a row a warp loads at once when it merges them. Loaded one after the other, their latencies were
  /// most of a short step. More would need more registers than the loop over tiles leaves, and spilled values are
  /// reloaded behind the copies: 17 at once cost 0.7 us of 14 (H200, CUDA 13.0).
  static constexpr int parts_at_once = D + Dv <= 256 ? 8 : 6;
  /// The same for a row much longer than the others, in a block that has no other work left.
  static constexpr int many_parts_at_once = 32;
  static_assert(many_parts_at_once <= 32, "tessera: a lane of a warp holds the state of one part");
  __device__ static bool has_many(const row_parts& of) { return of.count > 2 * parts_at_once; }
  /// How many blocks may merge one row. If a row has very many parts, each of the blocks that arrive last merges some
  /// of its query rows: one block alone would be limited by its share of the L2's bandwidth (188 KB for 92 parts).
  /// Sharing speeds up 92 parts (a step of 32.2 us, 33.3 alone) and slows down 38 (40.9, 40.1 alone; H200, CUDA 13.0).
  static constexpr index_t max_mergers = 4;
  __device__ index_t mergers_of(const row_parts& of) const {
    return of.count > 2 * many_parts_at_once ? (min)(max_mergers, index_t(used * groups)) : 1;
  }

  /// Returns the factor that turns a row's summed output into its output. The leader writes the row's log-sum-exp.
  __device__ float finish(const decode_row& at, int r, float max2, float sum, bool leader) const {
    const index_t token = small_quotient(first_query + r, group);
    const index_t q_head = at.head * group + first_query + r - token * group;
    return output_weight(p.rule, q_head, max2, sum,
                         leader && p.lse.data ? p.lse.row(at.sequence, token, q_head) : nullptr);
  }
  __device__ void write(const decode_row& at, int r, int d, const float4& x, float weight) const {
    const index_t token = small_quotient(first_query + r, group);
    const index_t q_head = at.head * group + first_query + r - token * group;
    Out* out = p.out.row(at.sequence, token, q_head) + d;
    out[0] = Out(x.x * weight);
    out[1] = Out(x.y * weight);
    out[2] = Out(x.z * weight);
    out[3] = Out(x.w * weight);
  }
  /// Calls `of(r, d)` for every row and every fourth output dim, spread over the block.
  template <class F>
  __device__ void for_each_four(const F& of) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < used * (Dv / 4); i += threads) of(i / (Dv / 4), i % (Dv / 4) * 4);
  }

  __device__ void write_empty_row(const decode_row& at) const {
    for_each_four([&](int r, int d) { write(at, r, d, float4{}, finish(at, r, -infinity, 0, d == 0)); });
  }
  /// Writes the output of rows without tokens: such rows have no tile and hence no block.
  __device__ void write_empty_rows() const {
    for (index_t row = blockIdx.x; row < rows; row += index_t(gridDim.x)) {
      if (ends[row] != base::begin_of(row)) continue;
      write_empty_row({row / p.view.kv_heads, row % p.view.kv_heads, 0, nullptr});
    }
  }

  __device__ float* outs_of(int w) const {
    return reinterpret_cast<float*>(memory + w * warp_bytes<View>(base::config::tuning));
  }
  __device__ float2* states_of(int w) const {
    return reinterpret_cast<float2*>(outs_of(w) + rows_per_block<View> * merge_pitch(Dv));
  }
  __device__ offset_t slot_of(index_t piece, index_t row) const {
    return (offset_t(blockIdx.y) * scratch.slots + piece + row) * rows_per_block<View>;
  }

  /// Some merged parts of a query row: their maximum (base 2), their sum, and four outputs.
  struct merged_four {
    float top, sum;
    float4 x;
  };
  /// Merges `parts` parts, at most `Most`, which `state_of(part)` and `out_of(part)` give.
  template <int Most, class StateOf, class OutOf>
  __device__ static merged_four merge_four(int parts, const StateOf& state_of, const OutOf& out_of) {
    merged_four all{-infinity, 0, {}};
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      if (i < parts) all.top = fmaxf(all.top, state_of(i).x);
    }
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      if (i >= parts) continue;
      const float2 part = state_of(i);
      const float factor = all.top == -infinity ? 1.0f : power_of_two(part.x - all.top);
      const float4 y = out_of(i);
      all.sum += part.y * factor;
      all.x.x += y.x * factor;
      all.x.y += y.y * factor;
      all.x.z += y.z * factor;
      all.x.w += y.w * factor;
    }
    return all;
  }
  /// Merges the parts of a query row that the block's warps hold.
  __device__ merged_four merge_warps_four(int r, int d) const {
    return merge_four<warps>(
        warps, [&](int w) { return states_of(w)[r]; },
        [&](int w) { return *reinterpret_cast<const float4*>(outs_of(w) + r * merge_pitch(Dv) + d); });
  }

  /// Merges the block's warps. If this part is the whole row, writes the row's output, else a part for `merge_parts`.
  __device__ void merge_warps(const segment& of, bool whole) const {
    for_each_four([&](int r, int d) {
      const merged_four own = merge_warps_four(r, d);
      if (whole) {
        write(of.source, r, d, own.x, finish(of.source, r, own.top, own.sum, d == 0));
      } else {
        const offset_t place = slot_of(blockIdx.x, of.row) + r;
        *reinterpret_cast<float4*>(scratch.out + place * Dv + d) = own.x;
        if (d == 0) scratch.state[place] = make_float2(own.top, own.sum);
      }
    });
  }

  /// What warps that merge a row together hand to the first of them.
  struct merge_shares {
    float4 out[warps][32];
    float2 state[warps];
  };

  /// Merges a row's parts if this block is among the last to arrive. The bits do not depend on which block merges.
  template <int AtOnce>
  __device__ void merge_parts(const decode_row& at, index_t row, const row_parts& of, int* flag,
                              merge_shares& shares) const {
    const index_t mergers = mergers_of(of), mine = arrive(row, of.count, mergers, flag);
    if (mine < 0) return;
    merge_slots<AtOnce>(slot_of(of.first_piece, row), of.count, mine, mergers, shares,
                        [&](int r, int d, float top, float sum, const float4& x) {
                          const float weight = finish(at, r, top, sum, d == 0);
                          if (d < Dv) write(at, r, d, x, weight);
                        });
  }

  /// Sums `parts` consecutive parts, of which `first` is the first. All lanes of a warp then call `take(r, d, maximum,
  /// sum, outputs)` for the query rows of the merger `mine` and output dims d to d + 3, of which some may lie beyond
  /// the last dim. Warps that would be idle take a share of the parts.
  template <int AtOnce, class Take>
  __device__ void merge_slots(offset_t first, index_t parts, index_t mine, index_t mergers, merge_shares& shares,
                              const Take& take) const {
    const int items = int(small_quotient(used * groups - mine + mergers - 1, mergers));
    int doubled = 0;
    while (items << (doubled + 1) <= warps) ++doubled;
    const int at_once = warps >> doubled, share = (warp << doubled) / warps;  // items, of which each has so many shares
    const index_t each = (parts + (1 << doubled) - 1) >> doubled;
#pragma unroll 1
    for (int begin = 0; begin < items; begin += at_once) {
      const int own = begin + (warp & (at_once - 1)), item = int(mine + own * mergers);
      const int r = item / groups, d = (item % groups * 32 + lane) * 4;
      const bool busy = own < items;
      float top = -infinity, sum = 0;
      float4 x{};
      if (busy) {
        sum_parts<AtOnce>(first + r, d < Dv ? d : 0, (min)(parts, share * each), (min)(parts, (share + 1) * each), top,
                          sum, x);
      }
      if (doubled > 0) {
        shares.out[warp][lane] = x;
        if (lane == 0) shares.state[warp] = make_float2(top, sum);
        __syncthreads();
        if (share == 0 && busy) {
          for (int other = warp + at_once; other < warps; other += at_once) {
            const float2 state = shares.state[other];
            const float4 y = shares.out[other][lane];
            const softmax_rise rise(top, state.x);
            const float factor = rise.weight(state.x);
            top = rise.largest;
            sum = sum * rise.shrink + state.y * factor;
            x.x = x.x * rise.shrink + y.x * factor;
            x.y = x.y * rise.shrink + y.y * factor;
            x.z = x.z * rise.shrink + y.z * factor;
            x.w = x.w * rise.shrink + y.w * factor;
          }
        }
      }
      if (share == 0 && busy) take(r, d, top, sum, x);
    }
  }
  /// Adds parts [begin, end) of the query row at `base` to a maximum, a sum and a lane's four outputs. The maximum is
  /// updated once per 32 parts, and fused products are written out: the bits do not depend on how many parts are read
  /// at once.
  template <int AtOnce>
  __device__ void sum_parts(offset_t base, int d, index_t begin, index_t end, float& top, float& sum, float4& x) const {
    const float2* states = scratch.state + base + begin * rows_per_block<View>;
    const float* outs = scratch.out + (base + begin * rows_per_block<View>)*Dv + d;
#pragma unroll 1
    for (; begin < end; begin += 32) {
      const index_t here = (min)(index_t(32), end - begin);
      // Each lane holds the state of one part.
      const float2 state = lane < here ? __ldcg(states + lane * rows_per_block<View>) : make_float2(-infinity, 0);
      float factor = 0;
#pragma unroll 1
      for (index_t done = 0; done < here; done += AtOnce) {
        float4 y[AtOnce];
#pragma unroll
        for (int part = 0; part < AtOnce; ++part) {
          if (part >= here - done) continue;
          y[part] = __ldcg(reinterpret_cast<const float4*>(outs + (done + part) * rows_per_block<View> * Dv));
        }
        if (done == 0) {
          const softmax_rise rise(top, lanes_max<32>(state.x));
          factor = rise.weight(state.x);
          top = rise.largest;
          sum = fmaf(sum, rise.shrink, warp_sum(__fmul_rn(state.y, factor)));
          x.x *= rise.shrink;
          x.y *= rise.shrink;
          x.z *= rise.shrink;
          x.w *= rise.shrink;
        }
#pragma unroll
        for (int part = 0; part < AtOnce; ++part) {
          const float weight = __shfl_sync(~0u, factor, int(done) + part);
          if (part < here - done) {
            x.x = fmaf(y[part].x, weight, x.x);
            x.y = fmaf(y[part].y, weight, x.y);
            x.z = fmaf(y[part].z, weight, x.z);
            x.w = fmaf(y[part].w, weight, x.w);
          }
        }
      }
      states += 32 * rows_per_block<View>;
      outs += 32 * rows_per_block<View> * Dv;
    }
  }
  static constexpr int groups = (Dv / 4 + 31) / 32;  // groups of 32 lanes; a lane has four output dims

  /// Returns which of a row's `mergers` this block is, or -1 if it is none of them. The mergers are the last of the
  /// row's `parts` blocks to arrive. They wait until all parts have arrived, and then see what the other blocks wrote.
  /// The wait always ends: a block arrives before it waits, and missing blocks run already or begin before any later
  /// launch.
  __device__ index_t arrive(index_t row, index_t parts, index_t mergers, int* flag) const {
    if (threadIdx.x == 0) {
      unsigned* arrived = scratch.arrived + offset_t(blockIdx.y) * scratch.max_rows + row;
      const index_t later = parts - 1 - index_t(add_acquire_release(arrived, 1));
      *flag = later < mergers ? int(later) : -1;
      if (later < mergers) {
        if (mergers > 1) {
          while (index_t(load_acquire(arrived)) < parts) continue;
        }
        // The last block to leave clears the counter for the next step.
        if (mergers == 1 || index_t(add_acquire_release(arrived, 1)) == parts + mergers - 1) *arrived = 0;
      }
    }
    __syncthreads();
    return *flag;
  }
};

template <class View, class Out>
struct decode_kernel : decode_merge<View, Out> {
  using base = decode_merge<View, Out>;
  using base::base;
  using base::first_query, base::group, base::lane, base::memory, base::p, base::parts_at_once, base::query_rows;
  using base::tile, base::tokens, base::used, base::warp;
  using typename base::merge_shares, typename base::segment;
  using T = typename View::element_type;
  using staging_type = decode_staging<View>;
  using state_type = typename decode_state_of<View>::type;
  using queries_type = typename state_type::queries;
  static constexpr int D = View::k_dim, stages = base::config::stages;

  /// Loads queries to registers, before the tiles. Through shared memory they would need a barrier behind the copies,
  /// which waits until the slowest warp has issued all of its tiles: slower by 1.8 us, spilled registers included. A
  /// barrier for the queries alone gained nothing, and cost 0.8 us with paged tables (H200, CUDA 13.0, B1 8K).
  __device__ void load_queries(const decode_row& at, queries_type& asked) const {
#pragma unroll
    for (int half = 0; half < rows_per_block<View> / 8; ++half) {
      const index_t r = first_query + lane / 4 + half * 8;
      const bool valid = r < query_rows;
      const index_t token = small_quotient(r, group);
      asked.load(half, valid ? p.q.row(at.sequence, token, at.head * group + r - token * group) : nullptr, lane);
    }
  }

  /// The positions of the step's first token, and of a span's first and last token.
  struct span_positions {
    index_t step, first, last;
  };
  __device__ index_t position_of(const decode_row& at, index_t token) const {
    return p.view.position(at.sequence, at.head, staging_type::slot_of(at, token));
  }
  __device__ span_positions positions_of(const segment& of) const {
    return {p.first_position[of.source.sequence], position_of(of.source, of.first_tile * tile),
            position_of(of.source, (min)(of.last_tile * tile, of.source.count) - 1)};
  }
  /// Whether all query rows see all tokens of the span. Positions ascend, so its first and last token decide.
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
      const std::uint32_t here = staging.await_tile();
      const index_t first = base::token_of(t);
      if (first < of.source.count) {
        const index_t held = (min)(index_t(tokens), of.source.count - first);
        bool visible = segment_visible;
        index_t mine = 0;  // the position of token lane % tokens of the tile
        if (!visible) {
          mine = position_of(of.source, first + lane % tokens);
          visible = all_visible({ends_at.step, __shfl_sync(~0u, mine, 0), __shfl_sync(~0u, mine, held - 1)});
        }
        const auto logit_of = [&](int i, int row, float product) {
          const index_t r = first_query + row, position = __shfl_sync(~0u, mine, i);
          const index_t query_position = ends_at.step + (r < query_rows ? small_quotient(r, group) : 0);
          const bool seen = visible || p.rule.visible(query_position, position);
          return seen && i < held ? quick_cap(p.rule, product * scale) * log2e : -infinity;
        };
        state.read(asked, here, uncapped && visible && held == tokens, !visible, scale * log2e, logit_of, lane);
      }
      __syncwarp();
      staging.fetch(p.view, of.source, t + stages, of.last_tile, tokens_from, lane);
    }
    state.close();
  }

  /// Prefetches the slots of tiles [first, last) before copies of K and V fill the memory queues, where slots would
  /// wait too.
  __device__ void prefetch_indices(const index_t* chosen, index_t first, index_t last, index_t count) const {
    const index_t token = first * tile + index_t(threadIdx.x) * 32;  // 128 bytes a thread
    if (token < (min)(last * tile, count)) prefetch_line(chosen + token);
  }

  /// The pieces of a row when every step cuts the tiles of all rows evenly.
  struct even_rows {
    even_pieces cut;
    static constexpr bool planned = false;
    __device__ index_t end() const { return cut.begin(index_t(blockIdx.x) + 1); }
    __device__ row_parts parts_of(const segment& of) const {
      const index_t first = cut.piece_of(of.row_begin);
      return {first, cut.piece_of(of.row_end - 1) - first + 1};
    }
  };
  /// The same when a split may have been made ahead. `planned`: this block reads its part of one row.
  struct split_rows {
    even_rows even;
    bool planned;
    row_parts part;
    index_t part_end;
    __device__ index_t end() const { return planned ? part_end : even.end(); }
    __device__ row_parts parts_of(const segment& of) const { return planned ? part : even.parts_of(of); }
  };

  /// Reads this block's piece. Its first segment is `now`.
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
      // The next row's first tiles are fetched before the previous row is merged, so that the merge hides their
      // latency. Small loads are issued before these tiles: issued behind them, they would wait until all tiles have
      // arrived.
      if (more) {
        if (now.source.chosen) prefetch_indices(now.source.chosen, now.first_tile, now.last_tile, now.source.count);
        staging.find(p.view, now.source, now.first_tile, now.last_tile, tokens_from, lane);
        load_queries(now.source, asked);
        ends_at = positions_of(now);
        staging.begin(p.view, now.source, now.first_tile, now.last_tile, tokens_from, lane);
      }
      if (!more) break;
      if (arrived.count > 1) {
        base::template merge_parts<parts_at_once>(arrived_at, arrived_row, arrived, flag, shares);
      }
      if (p.chosen.indices && now.row_end < end) {
        // The block that continues with the next row will find its slots in the L2.
        const index_t tiles = (min)(end, now.next_end) - now.row_end - base::restart;
        prefetch_indices(p.chosen.row(now.row + 1), 0, tiles, (tiles - 1) * tile + 1);
      }
      arrived_row = now.row;
      arrived_at = now.source;
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
    // The last row's parts are merged after the loop, when its registers are free and many parts can be read at once.
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
  __shared__ index_t ends[max_rows];
  __shared__ block_scan<kernel::threads, index_t> scan;
  __shared__ int flag;
  __shared__ typename kernel::merge_shares shares;
  static_assert(
      sizeof(ends) + sizeof(scan) + sizeof(flag) + sizeof(shares) <= decode_static_bytes(kernel::config::tuning),
      "tessera: a block's static memory is counted with what a launch asks for");
  kernel block(problem, scratch, memory, ends);
  typename kernel::segment first{};
  block.touch_parameters(scan.warp_total);
  wait_for_earlier();  // lengths, K, V, queries, and the workspace, in which the previous step may still merge
  let_later_begin();   // just before the merges takes the same time
  if constexpr (Split == decode_split::ahead) {
    row_parts own{};
    const bool planned = block.find_split(first, own);
    if (planned && (own.count == 0 || first.source.count == 0)) {
      if (own.count > 0) block.write_empty_row(first.source);
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
