// How parts of a row become its output: those of a block's warps, and those of several blocks.
#pragma once

#include "../../device/barrier.cuh"
#include "../../device/mma.cuh"
#include "../../device/warp.cuh"
#include "decode_plan.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View, class Out>
struct decode_merge : decode_block<View, Out> {
  using base = decode_block<View, Out>;
  using base::base;
  using base::ends, base::first_query, base::group, base::lane, base::memory, base::p, base::query_rows, base::rows;
  using base::scratch, base::threads, base::used, base::warp, base::warps;
  using typename base::segment;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  /// Parts of a row that a warp reads at once when they are merged: one after the other, their latencies were most of a
  /// short step. More registers than the loop over tiles leaves would spill, and what is spilled comes back behind the
  /// copies: 17 at once cost 0.7 us of 14 (H200, CUDA 13.0).
  static constexpr int parts_at_once = D + Dv <= 256 ? 8 : 6;
  /// In a block that has nothing else to do any more, for a row much longer than the others.
  static constexpr int many_parts_at_once = 32;
  static_assert(many_parts_at_once <= 32, "tessera: a lane of a warp holds the state of one part");
  __device__ static bool has_many(const row_parts& of) { return of.count > 2 * parts_at_once; }
  /// Of a row of very many parts the blocks that arrive last merge some query rows each: one block alone would wait for
  /// its share of the L2's bandwidth, 188 KB for 92 parts. Sharing helps 92 parts (a step of 32.2 us, 33.3 alone) and
  /// costs time with 38 (40.9, 40.1 alone; H200, CUDA 13.0).
  static constexpr index_t most_mergers = 4;
  __device__ index_t mergers_of(const row_parts& of) const {
    return of.count > 2 * many_parts_at_once ? (min)(most_mergers, index_t(used * groups)) : 1;
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

  __device__ void write_empty_row(const decode_row& at) const {
    for_each_four([&](int r, int d) { write(at, r, d, float4{}, finish(at, r, -infinity, 0, d == 0)); });
  }
  /// Rows that hold nothing have no tile and so no block.
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
    return reinterpret_cast<float2*>(outs_of(w) + rows_per_block * merge_pitch(Dv));
  }
  __device__ offset_t slot_of(index_t piece, index_t row) const {
    return (offset_t(blockIdx.y) * scratch.slots + piece + row) * rows_per_block;
  }

  /// Some parts of a query row put together: their maximum (base 2), their sum, and four outputs.
  struct merged_four {
    float top, sum;
    float4 x;
  };
  /// Of `parts` parts, at most `Most`, each `state_of(part)` and `out_of(part)`.
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
  /// What the block's warps have of a query row.
  __device__ merged_four merge_warps_four(int r, int d) const {
    return merge_four<warps>(
        warps, [&](int w) { return states_of(w)[r]; },
        [&](int w) { return *reinterpret_cast<const float4*>(outs_of(w) + r * merge_pitch(Dv) + d); });
  }

  /// The block's warps meet: the row's output if this part is all of it, else a part for `merge_parts`.
  __device__ void merge_warps(const segment& of, bool whole) const {
    for_each_four([&](int r, int d) {
      const merged_four own = merge_warps_four(r, d);
      if (whole) {
        write(of.at, r, d, own.x, finish(of.at, r, own.top, own.sum, d == 0));
      } else {
        const offset_t place = slot_of(blockIdx.x, of.row) + r;
        *reinterpret_cast<float4*>(scratch.out + place * Dv + d) = own.x;
        if (d == 0) scratch.state[place] = make_float2(own.top, own.sum);
      }
    });
  }

  /// What the warps that share a row's merge hand to the first of them.
  struct merge_shares {
    float4 out[warps][32];
    float2 state[warps];
  };

  /// Merges a row's parts if this block is among the last of them to arrive; the same bits whoever does it.
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

  /// Sums `parts` parts that lie one after the other from `first` on, and calls `take(r, d, maximum, sum, outputs)`
  /// with every lane of a warp for the query rows of the merger `mine` and output dims d to d + 3, some of them beyond
  /// the last one. Warps that would idle take a share of the parts.
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
      if (share == 0 && busy) take(r, d, top, sum, x);
    }
  }
  /// Adds parts [begin, end) of the query row at `base` to a maximum, a sum and a lane's four outputs. The maximum is
  /// that of 32 parts, and which products are fused is written out: the same bits however many are read at once.
  template <int AtOnce>
  __device__ void sum_parts(offset_t base, int d, index_t begin, index_t end, float& top, float& sum, float4& x) const {
    const float2* states = scratch.state + base + begin * rows_per_block;
    const float* outs = scratch.out + (base + begin * rows_per_block) * Dv + d;
#pragma unroll 1
    for (; begin < end; begin += 32) {
      const index_t here = (min)(index_t(32), end - begin);
      // A lane has the state of one part.
      const float2 state = lane < here ? __ldcg(states + lane * rows_per_block) : make_float2(-infinity, 0);
      float factor = 0;
#pragma unroll 1
      for (index_t done = 0; done < here; done += AtOnce) {
        float4 y[AtOnce];
#pragma unroll
        for (int part = 0; part < AtOnce; ++part) {
          if (part >= here - done) continue;
          y[part] = __ldcg(reinterpret_cast<const float4*>(outs + (done + part) * rows_per_block * Dv));
        }
        if (done == 0) {
          const float higher = fmaxf(top, lanes_max<32>(state.x));
          const float reference = higher == -infinity ? 0.0f : higher;
          const float shrink = power_of_two(top - reference);
          factor = power_of_two(state.x - reference);
          top = higher;
          sum = fmaf(sum, shrink, warp_sum(__fmul_rn(state.y, factor)));
          x.x *= shrink;
          x.y *= shrink;
          x.z *= shrink;
          x.w *= shrink;
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
      states += 32 * rows_per_block;
      outs += 32 * rows_per_block * Dv;
    }
  }
  static constexpr int groups = (Dv / 4 + 31) / 32;  // of 32 lanes, four output dims each

  /// Which of a row's `mergers` this block is, the last of its `parts` to arrive; -1 for the others. Mergers see what
  /// all parts wrote, and wait until all have arrived. That wait ends: a block arrives before it waits, and those that
  /// are missing run already or begin before anything that is launched later.
  __device__ index_t arrive(index_t row, index_t parts, index_t mergers, int* flag) const {
    if (threadIdx.x == 0) {
      unsigned* arrived = scratch.arrived + offset_t(blockIdx.y) * scratch.most_rows + row;
      const index_t later = parts - 1 - index_t(add_acquire_release(arrived, 1));
      *flag = later < mergers ? int(later) : -1;
      if (later < mergers) {
        if (mergers > 1) {
          while (index_t(load_acquire(arrived)) < parts) continue;
        }
        // The counter is cleared for the next step by the last to leave.
        if (mergers == 1 || index_t(add_acquire_release(arrived, 1)) == parts + mergers - 1) *arrived = 0;
      }
    }
    __syncthreads();
    return *flag;
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
