// The decode attention kernel: one pass over K and V, cut evenly over the machine whatever the lengths.
#pragma once

#include "../../device/launch.cuh"
#include "decode_schedule.cuh"
#include "decode_staging.cuh"
#include "decode_state.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View, class Out>
struct decode_kernel {
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  static constexpr decode_tuning tuning = decode_tuning_for(D, Dv, compiled_capability);
  static constexpr int warps = tuning.warps, tokens = tuning.tokens, stages = tuning.stages;
  static constexpr int threads = warps * 32, tile = warps * tokens;
  static constexpr float log2e = 1.44269504088896341f;
  /// Parts of a row that a warp reads at once when they are merged: one after the other, their latencies were most of a
  /// short step. More registers than the loop over tiles leaves would spill, and what is spilled comes back behind the
  /// copies: 17 at once cost 0.7 us of 14 (H200, CUDA 13.0).
  static constexpr int parts_at_once = D + Dv <= 256 ? 8 : 4;
  static_assert(32 % (2 * parts_at_once) == 0, "tessera: a lane of a warp holds the state of one of 32 parts");

  using T = typename View::element_type;
  using problem_type = decode_problem<View, Out>;
  using staging_type = decode_staging<View, decode_kernel>;
  using state_type = decode_state<View, decode_kernel>;

  const problem_type& p;
  const decode_scratch& scratch;
  unsigned char* memory;  // rings, then partial outputs
  index_t* ends;          // of rows, in tiles
  index_t rows, group, query_rows, first_query;
  int used;  // query rows of this block
  int warp, lane;

  /// The part of a piece that lies in one row.
  struct segment {
    index_t row, row_begin, row_end;  // in tiles of all rows
    index_t next_end;                 // of the next row, if there is one
    index_t first_tile, last_tile;    // in tiles of this row
    decode_row at;
  };

  __device__ decode_kernel(const problem_type& p_, const decode_scratch& scratch_, unsigned char* memory_,
                           index_t* ends_)
      : p(p_), scratch(scratch_), memory(memory_), ends(ends_) {
    rows = p.view.sequences * p.view.kv_heads;
    group = p.q.heads / p.view.kv_heads;
    query_rows = p.q.tokens * group;
    first_query = index_t(blockIdx.y) * rows_per_block;
    used = int(min(index_t(rows_per_block), query_rows - first_query));
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
  }

  /// Brings the launch's parameters to the constant cache, a line of 64 bytes at a time, while earlier launches run:
  /// each would be waited for at its first use (0.3 us of a step; H200, CUDA 13.0). The sum only keeps the loads.
  __device__ void touch_parameters(index_t* warp_totals) const {
    std::uint32_t sum = *(reinterpret_cast<const std::uint32_t*>(&scratch + 1) - 1);
#pragma unroll
    for (std::size_t i = 0; i < sizeof(p); i += 64) {
      sum += *reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const unsigned char*>(&p) + i);
    }
    if (lane == 31) *static_cast<volatile index_t*>(warp_totals + warp) = index_t(sum);
  }

  __device__ static index_t count_of(const problem_type& p, index_t row) {
    const index_t sequence = small_quotient(row, p.view.kv_heads);
    return p.chosen.indices ? p.chosen.count(row) : p.view.length(sequence, row - sequence * p.view.kv_heads);
  }
  __device__ index_t begin_of(index_t row) const { return row ? ends[row - 1] : 0; }
  __device__ index_t token_of(index_t t) const { return t * tile + warp * tokens; }

  __device__ static index_t tiles_of(index_t count) { return (count + tile - 1) / tile; }

  /// Rows of a lane where every warp scans all of them for itself.
  static constexpr int rows_each = 4;

  /// The rows' ends in `ends`, and the cut of all of their tiles. `first` is this block's first segment if it has one.
  /// Up to 128 rows every warp scans for itself and waits for nobody; `ends` is there after the next barrier.
  __device__ even_cut plan(segment& first, index_t* warp_totals) const {
    const index_t me = blockIdx.x;
    if (rows <= 32) return plan_in_warp<1>(first);
    if (rows <= 32 * rows_each) return plan_in_warp<rows_each>(first);
    scan_rows<threads>(rows, ends, warp_totals, [&](index_t row) { return tiles_of(count_of(p, row)); });
    const even_cut cut(ends[rows - 1], index_t(gridDim.x), rows, false);
    if (me < cut.count && cut.tiles > 0) {
      first = segment_at(find_row(ends, rows, cut.begin(me)), cut.begin(me), cut.begin(me + 1));
    }
    return cut;
  }
  template <int Each>
  __device__ even_cut plan_in_warp(segment& first) const {
    index_t count[Each], end[Each], sum = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) count[i] = count_of(p, min(lane * Each + i, rows - 1));
#pragma unroll
    for (int i = 0; i < Each; ++i) end[i] = sum += lane * Each + i < rows ? tiles_of(count[i]) : 0;
    const index_t before = scan_warp(sum) - sum;
#pragma unroll
    for (int i = 0; i < Each; ++i) end[i] += before;
    const index_t tiles = __shfl_sync(~0u, end[Each - 1], 31);
    bool equal = true;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const index_t row = lane * Each + i;
      equal &= row >= rows || end[i] * rows == tiles * (row + 1);
    }
    const even_cut cut(tiles, index_t(gridDim.x), rows, __all_sync(~0u, equal));
    const index_t begin = cut.begin(index_t(blockIdx.x));
    index_t ended = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      ended += __popc(__ballot_sync(~0u, lane * Each + i < rows && end[i] <= begin));
      if (warp == 0 && lane * Each + i < rows) ends[lane * Each + i] = end[i];
    }
    const index_t row = min(ended, rows - 1);
    // Lanes pick their share of the row before they hand it on.
    const auto of_row = [&](const index_t(&values)[Each], index_t r) {
      index_t mine = 0;
#pragma unroll
      for (int i = 0; i < Each; ++i) mine |= values[i] & -index_t(r % Each == i);
      return __shfl_sync(~0u, mine, r / Each);
    };
    first.row = ended;
    first.row_end = of_row(end, row);
    first.row_begin = row ? of_row(end, row - 1) : 0;
    first.next_end = of_row(end, min(row + 1, rows - 1));
    first.at.count = of_row(count, row);
    first.at.sequence = small_quotient(row, p.view.kv_heads);
    first.at.head = row - first.at.sequence * p.view.kv_heads;
    first.at.chosen = p.chosen.indices ? p.chosen.row(row) : nullptr;
    first.first_tile = begin - first.row_begin;
    first.last_tile = min(cut.begin(index_t(blockIdx.x) + 1), first.row_end) - first.row_begin;
    return cut;
  }
  __device__ segment segment_at(index_t row, index_t begin, index_t end) const {
    const index_t row_begin = begin_of(row), row_end = ends[row];
    const index_t sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
    return {row,
            row_begin,
            row_end,
            ends[min(row + 1, rows - 1)],
            begin - row_begin,
            min(end, row_end) - row_begin,
            decode_row{sequence, head, count_of(p, row), p.chosen.indices ? p.chosen.row(row) : nullptr}};
  }

  /// The weight that turns a row's summed output into its output; the leader writes its log-sum-exp.
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

  /// Rows that hold nothing have no tile and so no block.
  __device__ void write_empty_rows() const {
    for (index_t row = blockIdx.x; row < rows; row += index_t(gridDim.x)) {
      if (ends[row] != begin_of(row)) continue;
      const decode_row at{row / p.view.kv_heads, row % p.view.kv_heads, 0, nullptr};
      for_each_four([&](int r, int d) { write(at, r, d, float4{}, finish(at, r, -infinity, 0, d == 0)); });
    }
  }

  /// Straight to registers, ahead of the tiles. Through shared memory, a barrier of the block behind the copies waits
  /// until the slowest warp has issued all of its tiles (slower by 1.8 us, spilled registers included), and one that only
  /// waits for the queries gained nothing and cost 0.8 us in pages (H200, CUDA 13.0, B1 8K).
  __device__ void load_queries(const decode_row& at, std::uint32_t (&q)[D / 16][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t r = first_query + lane / 4 + half * 8;
      const bool valid = r < query_rows;
      const index_t token = small_quotient(r, group);
      const T* from = valid ? p.q.row(at.sequence, token, at.head * group + r - token * group) : nullptr;
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          q[step][upper * 2 + half] =
              valid ? *reinterpret_cast<const std::uint32_t*>(from + step * 16 + upper * 8 + lane % 4 * 2) : 0u;
        }
      }
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
            position_of(of.at, min(of.last_tile * tile, of.at.count) - 1)};
  }
  /// Are all tokens between two visible to all query rows? Positions ascend, so the ends tell.
  __device__ bool all_visible(const span_positions& at) const {
    return at.last <= at.step + small_quotient(first_query, group) &&
           (p.rule.sliding_window <= 0 || p.rule.visible(at.step + p.q.tokens - 1, at.first));
  }

  __device__ void read_tiles(const segment& of, const span_positions& ends_at, const std::uint32_t (&q)[D / 16][4],
                             staging_type& staging, state_type& state) const {
    const float scale = p.rule.scale_for(D);
    const bool uncapped = p.rule.soft_cap <= 0;
    const bool segment_visible = all_visible(ends_at);
    const auto tokens_from = [&](index_t t) { return token_of(t); };
    for (index_t t = of.first_tile; t < of.last_tile; ++t) {
      const std::uint32_t here = staging.take();
      const index_t first = token_of(t);
      if (first < of.at.count) {
        const index_t held = min(index_t(tokens), of.at.count - first);
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
        state.read(q, here, uncapped && visible && held == tokens, !visible, scale * log2e, logit_of, lane);
      }
      __syncwarp();
      staging.put(p.view, of.at, t + stages, of.last_tile, tokens_from, lane);
    }
    state.close();
  }

  __device__ float* outs_of(int w) const { return reinterpret_cast<float*>(memory + w * warp_bytes(tuning, D, Dv)); }
  __device__ float2* states_of(int w) const {
    return reinterpret_cast<float2*>(outs_of(w) + rows_per_block * merge_pitch(Dv));
  }
  __device__ offset_t slot_of(index_t piece, index_t row) const {
    return (offset_t(blockIdx.y) * scratch.slots + piece + row) * rows_per_block;
  }

  /// The block's warps meet: the row's output if this part is all of it, else a part for `merge_parts`.
  __device__ void merge_warps(const segment& of, bool whole) const {
    for_each_four([&](int r, int d) {
      float top = -infinity, sum = 0;
#pragma unroll
      for (int w = 0; w < warps; ++w) top = fmaxf(top, states_of(w)[r].x);
      float4 x{};
#pragma unroll
      for (int w = 0; w < warps; ++w) {
        const float2 part = states_of(w)[r];
        const float factor = top == -infinity ? 1.0f : power_of_two(part.x - top);
        const float4 y = *reinterpret_cast<const float4*>(outs_of(w) + r * merge_pitch(Dv) + d);
        sum += part.y * factor;
        x.x += y.x * factor;
        x.y += y.y * factor;
        x.z += y.z * factor;
        x.w += y.w * factor;
      }
      if (whole) {
        write(of.at, r, d, x, finish(of.at, r, top, sum, d == 0));
      } else {
        const offset_t place = slot_of(blockIdx.x, of.row) + r;
        *reinterpret_cast<float4*>(scratch.out + place * Dv + d) = x;
        if (d == 0) scratch.state[place] = make_float2(top, sum);
      }
    });
  }

  /// What the warps that share a row's merge hand to the first of them.
  struct merge_shares {
    float4 out[warps][32];
    float2 state[warps];
  };

  /// The row's output from its parts, in the order of pieces: the same bits whoever does it. Warps that would idle take
  /// a share of the parts.
  template <int AtOnce>
  __device__ void merge_parts(const decode_row& at, index_t row, index_t first_piece, index_t parts,
                              merge_shares& shares) const {
    const int items = used * groups, doubled = items <= warps / 4 ? 2 : items <= warps / 2 ? 1 : 0;
    const int at_once = warps >> doubled, share = (warp << doubled) / warps;  // items, of which each has so many shares
    const index_t each = (parts + (1 << doubled) - 1) >> doubled;
#pragma unroll 1
    for (int begin = 0; begin < items; begin += at_once) {
      const int item = begin + (warp & (at_once - 1)), r = item / groups, d = (item % groups * 32 + lane) * 4;
      const bool busy = item < items, mine = busy && d < Dv;
      float top = -infinity, sum = 0;
      float4 x{};
      if (busy) {
        const offset_t base = slot_of(first_piece, row) + r;
        sum_parts<AtOnce>(base, mine ? d : 0, share * each, min(parts, (share + 1) * each), top, sum, x);
      }
      if (doubled > 0) {
        shares.out[warp][lane] = x;
        if (lane == 0) shares.state[warp] = make_float2(top, sum);
        __syncthreads();
        if (share == 0 && busy) {
          for (int other = warp + at_once; other < warps; other += at_once) {
            const float2 state = shares.state[other];
            const float4 y = shares.out[other][lane];
            const float higher = fmaxf(top, state.x), reference = higher == -infinity ? 0.0f : higher;
            const float shrink = power_of_two(top - reference), factor = power_of_two(state.x - reference);
            top = higher;
            sum = sum * shrink + state.y * factor;
            x.x = x.x * shrink + y.x * factor;
            x.y = x.y * shrink + y.y * factor;
            x.z = x.z * shrink + y.z * factor;
            x.w = x.w * shrink + y.w * factor;
          }
        }
      }
      if (share == 0 && busy) {
        const float weight = finish(at, r, top, sum, d == 0);
        if (mine) write(at, r, d, x, weight);
      }
    }
  }
  /// Adds parts [begin, end) of the query row at `base` to a maximum, a sum and a lane's four outputs.
  template <int AtOnce>
  __device__ void sum_parts(offset_t base, int d, index_t begin, index_t end, float& top, float& sum, float4& x) const {
    const float2* states = scratch.state + base + begin * rows_per_block;
    const float* outs = scratch.out + (base + begin * rows_per_block) * Dv + d;
    float factor = 0;
#pragma unroll 1
    for (index_t part = 0; part < end - begin; part += AtOnce) {
      const index_t here = min(index_t(AtOnce), end - begin - part), held = part % 32;
      float4 y[AtOnce];
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        if (i < here) y[i] = __ldcg(reinterpret_cast<const float4*>(outs + (part + i) * rows_per_block * Dv));
      }
      if (held == 0) {
        // A lane has the state of one of the next 32 parts.
        const float2 state =
            part + lane < end - begin ? __ldcg(states + (part + lane) * rows_per_block) : make_float2(-infinity, 0);
        const float higher = fmaxf(top, max_of_warp(state.x));
        const float reference = higher == -infinity ? 0.0f : higher;
        const float shrink = power_of_two(top - reference);
        factor = power_of_two(state.x - reference);
        top = higher;
        sum = sum * shrink + sum_of_warp(state.y * factor);
        x.x *= shrink;
        x.y *= shrink;
        x.z *= shrink;
        x.w *= shrink;
      }
#pragma unroll
      for (int i = 0; i < AtOnce; ++i) {
        const float weight = __shfl_sync(~0u, factor, held + i);
        if (i < here) {
          x.x += y[i].x * weight;
          x.y += y[i].y * weight;
          x.z += y[i].z * weight;
          x.w += y[i].w * weight;
        }
      }
    }
  }
  static constexpr int groups = (Dv / 4 + 31) / 32;  // of 32 lanes, four output dims each
  __device__ static float max_of_warp(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ static float sum_of_warp(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  /// True in the block that is the last of a row's `parts` to arrive; it sees what the others wrote.
  __device__ bool last_to_arrive(index_t row, index_t parts, bool* flag) const {
    if (threadIdx.x == 0) {
      unsigned* arrived = scratch.arrived + offset_t(blockIdx.y) * scratch.most_rows + row;
      unsigned before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
      *flag = before == unsigned(parts - 1);
      if (*flag) *arrived = 0;  // for the next step
    }
    __syncthreads();
    return *flag;
  }

  /// Asks for the slots of tiles [first, last) before K and V fill the memory's queues, where a slot would wait with
  /// them.
  __device__ void prefetch_indices(const index_t* chosen, index_t first, index_t last, index_t count) const {
    const index_t token = first * tile + index_t(threadIdx.x) * 32;  // 128 bytes a thread
    if (token < min(last * tile, count)) prefetch_line(chosen + token);
  }

  __device__ void run(const even_cut& cut, segment now, bool* flag, merge_shares& shares) const {
    const index_t end = cut.begin(index_t(blockIdx.x) + 1);
    staging_type staging(shared_address(memory + warp * warp_bytes(tuning, D, Dv)));
    const auto tokens_from = [&](index_t t) { return token_of(t); };
    bool more = true, first = true;
    index_t arrived_row = 0, arrived_first = 0, arrived_parts = 1;
    decode_row arrived_at{};
    span_positions ends_at{};
    std::uint32_t q[D / 16][4];
#pragma unroll 1
    while (true) {
      if (!more) {
        // A block that is done has registers for more parts at once: a row much longer than the others has many.
        if (arrived_parts > 1 && last_to_arrive(arrived_row, arrived_parts, flag)) {
          merge_parts<2 * parts_at_once>(arrived_at, arrived_row, arrived_first, arrived_parts, shares);
        }
        return;
      }
      // A row's first tiles leave before the row before it is done with: its merge costs their latency or less. What is
      // small leaves before them: behind them it would wait until all of them are there.
      if (now.at.chosen) prefetch_indices(now.at.chosen, now.first_tile, now.last_tile, now.at.count);
      staging.find(p.view, now.at, now.first_tile, now.last_tile, tokens_from, lane);
      load_queries(now.at, q);
      ends_at = positions_of(now);
      staging.begin(p.view, now.at, now.first_tile, now.last_tile, tokens_from, lane);
      if (arrived_parts > 1 && last_to_arrive(arrived_row, arrived_parts, flag)) {
        merge_parts<parts_at_once>(arrived_at, arrived_row, arrived_first, arrived_parts, shares);
      }
      if (p.chosen.indices && now.row_end < end) {
        // A block that goes on into the next row will find its slots in the L2.
        const index_t tiles = min(end, now.next_end) - now.row_end;
        prefetch_indices(p.chosen.row(now.row + 1), 0, tiles, (tiles - 1) * tile + 1);
      }
      arrived_row = now.row;
      arrived_at = now.at;
      arrived_first = cut.piece_of(now.row_begin);
      arrived_parts = cut.piece_of(now.row_end - 1) - arrived_first + 1;
      {
        state_type state;
        read_tiles(now, ends_at, q, staging, state);
        state.store(outs_of(warp), states_of(warp), used, lane);
      }
      __syncthreads();
      merge_warps(now, arrived_parts == 1);
      if (first) write_empty_rows();
      first = false;
      __syncthreads();
      const index_t begin = now.row_begin + now.last_tile;
      more = begin < end;
      if (more) {
        index_t row = now.row + 1;
        while (ends[row] <= begin) ++row;
        now = segment_at(row, begin, end);
      }
    }
  }
};

template <class View, class Out>
__global__ void __launch_bounds__(decode_kernel<View, Out>::threads, decode_kernel<View, Out>::tuning.blocks)
    decode_entry(const __grid_constant__ decode_problem<View, Out> problem,
                 const __grid_constant__ decode_scratch scratch) {
  using kernel = decode_kernel<View, Out>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ index_t ends[most_rows], warp_totals[kernel::warps];
  __shared__ bool flag;
  __shared__ typename kernel::merge_shares shares;
  const kernel block(problem, scratch, memory, ends);
  typename kernel::segment first{};
  block.touch_parameters(warp_totals);
  wait_for_earlier();  // lengths, K, V, queries, and the workspace that the step before may still merge in
  let_later_begin();   // now or just before the merges: the same times
  const even_cut cut = block.plan(first, warp_totals);
  if (index_t(blockIdx.x) >= cut.count || cut.tiles == 0) {
    __syncthreads();
    block.write_empty_rows();
    return;
  }
  block.run(cut, first, &flag, shares);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
