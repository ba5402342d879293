// The decode attention kernel: one pass over K and V, cut evenly over the machine whatever the lengths.
#pragma once

#include <algorithm>

#include "../../core/logit_rule.hpp"
#include "../../core/selection.hpp"
#include "../../core/views.hpp"
#include "mma.cuh"
#include "tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// What a decode step reads and writes; every pointer is a device pointer, every length is read on the device.
template <class View>
struct decode_problem {
  using T = typename View::element_type;
  View view;
  rows_view<const T> q;           ///< [sequences, tokens, q_heads, k_dim]
  const index_t* first_position;  ///< [sequences], position of the step's first token
  logit_rule rule;
  rows_view<float> out;   ///< [sequences, tokens, q_heads, v_dim]
  rows_view<float> lse;   ///< [sequences, tokens, q_heads]; data null: not wanted
  selection_view chosen;  ///< row = sequence * kv_heads + head; indices null: everything stored
};

namespace detail {

inline constexpr int rows_per_block = 16;   // query rows of a matrix product
inline constexpr int tokens_per_warp = 32;  // of one tile
inline constexpr int most_rows = 1024;      // (sequence, kv_head) rows whose tile counts fit the block's scan

template <int D>
inline constexpr int padded_chunks = (D / 8) |
                                     1;  // 16-byte chunks of a staged row: odd, so matrix loads do not collide

template <int D, int Dv>
inline constexpr int stage_bytes = tokens_per_warp*(padded_chunks<D> + padded_chunks<Dv>)*16;

/// Scratch: a counter per (row, query block), then partial outputs and softmax states by slot = block + row.
struct decode_scratch {
  unsigned* arrived;
  float* out;     // [query blocks, blocks + rows, 16, v_dim]
  float2* state;  // [query blocks, blocks + rows, 16] maximum (base 2) and sum
};

template <class View, int Warps, int Stages>
struct decode_kernel {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, threads = Warps * 32, tile = Warps * tokens_per_warp;
  static constexpr int k_row = padded_chunks<D> * 16, v_row = padded_chunks<Dv> * 16;
  static constexpr int ring_bytes = Stages * stage_bytes<D, Dv>;
  static constexpr int merge_bytes = rows_per_block * (Dv + 2) * 4;
  static constexpr int warp_bytes = ring_bytes > merge_bytes ? ring_bytes : merge_bytes;
  static constexpr int shared_bytes = Warps * warp_bytes;

  struct row_range {
    index_t sequence, head, count;
  };

  __device__ static index_t count_of(const decode_problem<View>& p, index_t row) {
    return p.chosen.indices ? p.chosen.count(row) : p.view.length(row / p.view.kv_heads, row % p.view.kv_heads);
  }

  /// Where one lane's token of a tile lies.
  struct token_rows {
    const T *k, *v;
    bool valid;
  };
  __device__ static token_rows find(const decode_problem<View>& p, const row_range& at, index_t token) {
    token_rows found;
    found.valid = token < at.count;
    index_t slot = found.valid ? token : 0;
    if (p.chosen.indices && found.valid) {
      slot = p.chosen.row(offset_t(at.sequence) * p.view.kv_heads + at.head)[token];
    }
    found.k = p.view.key(at.sequence, at.head, slot);
    found.v = p.view.value(at.sequence, at.head, slot);
    return found;
  }

  /// A warp's ring of staged tiles: lanes copy 16 bytes at a time, zeros for tokens beyond the end.
  /// One bulk copy per row (cp.async.bulk, sm_90) lost: 2.8 TB/s where this reaches 4.4 (H200, CUDA 13.0, B8 128K).
  struct staging {
    std::uint32_t ring;  // shared address
    std::uint32_t uses = 0, taken = 0;

    __device__ std::uint32_t slot(std::uint32_t use) const { return ring + use % Stages * stage_bytes<D, Dv>; }

    __device__ void put(const decode_problem<View>& p, const row_range& at, index_t first, int lane) {
      const token_rows mine = find(p, at, first + lane);
      const std::uint32_t to = slot(uses++);
      copy<D / 8, k_row>(mine.k, mine.valid, to, lane);
      copy<Dv / 8, v_row>(mine.v, mine.valid, to + tokens_per_warp * k_row, lane);
    }
    template <int Chunks, int RowBytes>
    __device__ static void copy(const T* row, bool mine_valid, std::uint32_t to, int lane) {
#pragma unroll
      for (int i = 0; i < Chunks; ++i) {
        const int id = i * 32 + lane, token = id / Chunks, chunk = id % Chunks;
        const T* from = reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), token));
        const bool valid = __shfl_sync(~0u, int(mine_valid), token);
        copy_async16(to + std::uint32_t(token * RowBytes + chunk * 16), from + chunk * 8, valid);
      }
    }
    /// Waits for the oldest tile and returns where it lies.
    __device__ std::uint32_t take() {
      wait_copies<Stages - 2>();
      __syncwarp();
      return slot(taken++);
    }
  };

  /// Running state of one warp: 16 query rows over the tokens that it has seen.
  struct warp_state {
    float out[Dv / 8][4];
    float max[2], sum[2];  // rows lane / 4 and lane / 4 + 8, base 2
  };

  __device__ static void consume(const decode_problem<View>& p, const row_range& at, index_t first, bool plain,
                                 const index_t (&query_position)[2], const std::uint32_t (&q)[D / 16][4],
                                 std::uint32_t shared, int lane, warp_state& state) {
    constexpr float log2e = 1.44269504088896341f;
    float s[4][4] = {};
    const int matrix = lane / 8, in_matrix = lane % 8;
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        std::uint32_t b[4];
        const int token = pair * 16 + matrix / 2 * 8 + in_matrix;
        load_matrices(b, shared + std::uint32_t(token * k_row + (step * 2 + matrix % 2) * 16));
        multiply<T>(s[pair * 2], q[step], b[0], b[1]);
        multiply<T>(s[pair * 2 + 1], q[step], b[2], b[3]);
      }
    }
    const float scale = p.rule.scale_for(D);
    if (plain && p.rule.soft_cap <= 0) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scale * log2e;
      }
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const index_t token = first + n * 8 + lane % 4 * 2 + i % 2;
          bool seen = token < at.count;
          if (seen && !plain) {
            const index_t slot =
                p.chosen.indices ? p.chosen.row(offset_t(at.sequence) * p.view.kv_heads + at.head)[token] : token;
            seen = p.rule.visible(query_position[i / 2], p.view.position(at.sequence, at.head, slot));
          }
          s[n][i] = seen ? p.rule.cap(s[n][i] * scale) * log2e : -infinity;
        }
      }
    }
    std::uint32_t weights[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = state.max[half];
#pragma unroll
      for (int n = 0; n < 4; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float reference = top == -infinity ? 0.0f : top;
      const float shrink = exp2f(state.max[half] - reference);  // exp2(-inf) = 0: nothing seen so far
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        s[n][half * 2] = exp2f(s[n][half * 2] - reference);
        s[n][half * 2 + 1] = exp2f(s[n][half * 2 + 1] - reference);
        sum += s[n][half * 2] + s[n][half * 2 + 1];
      }
      state.sum[half] = state.sum[half] * shrink + sum;
      if (top != state.max[half]) {
#pragma unroll
        for (int n = 0; n < Dv / 8; ++n) {
          state.out[n][half * 2] *= shrink;
          state.out[n][half * 2 + 1] *= shrink;
        }
      }
      state.max[half] = top;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = pack_pair<T>(s[k * 2 + i / 2][i % 2 * 2], s[k * 2 + i / 2][i % 2 * 2 + 1]);
      }
    }
    const std::uint32_t values = shared + tokens_per_warp * k_row;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int pair = 0; pair < Dv / 16; ++pair) {
        std::uint32_t b[4];
        const int token = k * 16 + matrix % 2 * 8 + in_matrix;
        load_matrices_transposed(b, values + std::uint32_t(token * v_row + (pair * 2 + matrix / 2) * 16));
        multiply<T>(state.out[pair * 2], weights[k], b[0], b[1]);
        multiply<T>(state.out[pair * 2 + 1], weights[k], b[2], b[3]);
      }
    }
  }

  /// Output and log-sum-exp of one query row from its merged state; `scaled(d)` is the unnormalised output.
  template <class Scaled>
  __device__ static void write_row(const decode_problem<View>& p, index_t sequence, index_t token, index_t q_head,
                                   float max2, float sum, const Scaled& scaled, int lane) {
    constexpr float log2e = 1.44269504088896341f;
    float top = max2, factor = 1;
    if (p.rule.sink_logits) {
      const float sink = p.rule.sink_logits[q_head] * log2e;
      top = fmaxf(max2, sink);
      factor = exp2f(max2 - top);
      sum = sum * factor + exp2f(sink - top);
    }
    const float inverse = sum == 0 ? 0.0f : factor / sum;
    float* out = p.out.row(sequence, token, q_head);
    for (int d = lane; d < Dv; d += 32) out[d] = scaled(d) * inverse;
    if (p.lse.data && lane == 0) {
      *p.lse.row(sequence, token, q_head) = sum == 0 ? -infinity : (top + log2f(sum)) * 0.693147180559945309f;
    }
  }

  __device__ static void run(const decode_problem<View>& p, const decode_scratch& scratch) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ index_t ends[most_rows];  // inclusive prefix sum of tiles by row
    __shared__ bool last_arrived;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const index_t rows = p.view.sequences * p.view.kv_heads, group = p.q.heads / p.view.kv_heads;
    const index_t query_rows = p.q.tokens * group, first_query = index_t(blockIdx.y) * rows_per_block;
    const int used = int(min(index_t(rows_per_block), query_rows - first_query));
    const index_t me = blockIdx.x;

    // Every block scans the lengths itself: they change from step to step and the host does not know them.
    if (warp == 0) {
      index_t total = 0;
      for (index_t base = 0; base < rows; base += 32) {
        const index_t row = base + lane;
        index_t tiles = row < rows ? (count_of(p, row) + tile - 1) / tile : 0;
        for (int step = 1; step < 32; step *= 2) {
          const index_t other = __shfl_up_sync(~0u, tiles, step);
          if (lane >= step) tiles += other;
        }
        if (row < rows) ends[row] = total + tiles;
        total += __shfl_sync(~0u, tiles, 31);
      }
    }
    __syncthreads();
    const index_t total = ends[rows - 1];
    // No more blocks than tiles, so that each of them has work and arrives.
    const index_t blocks = min(index_t(gridDim.x), max(total, 1));

    // Rows that hold nothing have no tile and so no block: their outputs are written here.
    for (index_t row = me; row < rows; row += index_t(gridDim.x)) {
      if (ends[row] != (row ? ends[row - 1] : 0)) continue;
      for (int r = warp; r < used; r += Warps) {
        write_row(
            p, row / p.view.kv_heads, (first_query + r) / group,
            row % p.view.kv_heads * group + (first_query + r) % group, -infinity, 0, [](int) { return 0.0f; }, lane);
      }
    }
    if (me >= blocks) return;
    index_t begin = index_t(offset_t(me) * total / blocks);
    const index_t end = index_t(offset_t(me + 1) * total / blocks);
    if (begin >= end) return;

    index_t row = 0;
    while (ends[row] <= begin) ++row;
    staging tiles{shared_address(memory + warp * warp_bytes)};
    for (; begin < end; ++row) {
      const index_t row_begin = row ? ends[row - 1] : 0;
      if (ends[row] == row_begin) continue;
      const index_t stop = min(end, ends[row]);
      const row_range at{row / p.view.kv_heads, row % p.view.kv_heads, count_of(p, row)};

      warp_state state{};
      state.max[0] = state.max[1] = -infinity;

      const index_t first_tile = begin - row_begin, last_tile = stop - row_begin;
      const auto token_of = [&](index_t t) { return t * tile + warp * tokens_per_warp; };
      for (int s = 0; s < Stages - 1; ++s) {
        if (first_tile + s < last_tile) tiles.put(p, at, token_of(first_tile + s), lane);
        commit_copies();
      }
      // Queries are read while the first tiles are on their way.
      std::uint32_t q[D / 16][4];
      index_t query_position[2];
      index_t oldest_query = p.first_position[at.sequence] + first_query / group;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const index_t r = first_query + lane / 4 + half * 8;
        const bool valid = r < query_rows;
        query_position[half] = p.first_position[at.sequence] + (valid ? r / group : 0);
        const T* from = valid ? p.q.row(at.sequence, r / group, at.head * group + r % group) : nullptr;
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            q[step][upper * 2 + half] =
                valid ? *reinterpret_cast<const std::uint32_t*>(from + step * 16 + upper * 8 + lane % 4 * 2) : 0u;
          }
        }
      }
      for (index_t t = first_tile; t < last_tile; ++t) {
        const std::uint32_t here = tiles.take();
        if (t + Stages - 1 < last_tile) tiles.put(p, at, token_of(t + Stages - 1), lane);
        commit_copies();
        const index_t first = token_of(t);
        // All of the tile visible to all rows? Positions ascend, so its ends tell.
        bool plain = first + tokens_per_warp <= at.count;
        if (plain) {
          const index_t* chosen =
              p.chosen.indices ? p.chosen.row(offset_t(at.sequence) * p.view.kv_heads + at.head) : nullptr;
          const index_t last_token = first + tokens_per_warp - 1;
          plain = p.view.position(at.sequence, at.head, chosen ? chosen[last_token] : last_token) <= oldest_query;
          if (plain && p.rule.sliding_window > 0) {
            plain = p.rule.visible(p.first_position[at.sequence] + p.q.tokens - 1,
                                   p.view.position(at.sequence, at.head, chosen ? chosen[first] : first));
          }
        }
        if (first < at.count) {
          consume(p, at, first, plain, query_position, q, here, lane, state);
        }
        __syncwarp();
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        state.sum[half] += __shfl_xor_sync(~0u, state.sum[half], 1);
        state.sum[half] += __shfl_xor_sync(~0u, state.sum[half], 2);
      }

      // Warps of the block meet in shared memory, in the place of their rings.
      __syncthreads();
      const auto out_of = [&](int w) { return reinterpret_cast<float*>(memory + w * warp_bytes); };
      float* my_out = out_of(warp);
      float* my_state = my_out + rows_per_block * Dv;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = lane / 4 + half * 8;
        if (r >= used) continue;
#pragma unroll
        for (int n = 0; n < Dv / 8; ++n) {
          my_out[r * Dv + n * 8 + lane % 4 * 2] = state.out[n][half * 2];
          my_out[r * Dv + n * 8 + lane % 4 * 2 + 1] = state.out[n][half * 2 + 1];
        }
        if (lane % 4 == 0) {
          my_state[r * 2] = state.max[half];
          my_state[r * 2 + 1] = state.sum[half];
        }
      }
      __syncthreads();
      const index_t first_block = index_t((offset_t(row_begin + 1) * blocks - 1) / total);
      const index_t last_block = index_t((offset_t(ends[row]) * blocks - 1) / total);
      const offset_t slots = offset_t(blocks) + rows;
      for (int r = warp; r < used; r += Warps) {
        float top = -infinity, sum = 0, factor[Warps];
        for (int w = 0; w < Warps; ++w) top = fmaxf(top, out_of(w)[rows_per_block * Dv + r * 2]);
        for (int w = 0; w < Warps; ++w) {
          const float* of = out_of(w) + rows_per_block * Dv + r * 2;
          factor[w] = top == -infinity ? 1.0f : exp2f(of[0] - top);
          sum += of[1] * factor[w];
        }
        const auto merged = [&](int d) {
          float value = 0;
          for (int w = 0; w < Warps; ++w) value += out_of(w)[r * Dv + d] * factor[w];
          return value;
        };
        if (first_block == last_block) {
          write_row(p, at.sequence, (first_query + r) / group, at.head * group + (first_query + r) % group, top, sum,
                    merged, lane);
        } else {
          const offset_t place = (offset_t(blockIdx.y) * slots + me + row) * rows_per_block + r;
          for (int d = lane; d < Dv; d += 32) scratch.out[place * Dv + d] = merged(d);
          if (lane == 0) scratch.state[place] = make_float2(top, sum);
        }
      }
      if (first_block != last_block) {
        // The block that arrives last merges the row's parts, in block order: the same bits whoever it is.
        __threadfence();
        __syncthreads();
        unsigned* arrived = scratch.arrived + offset_t(blockIdx.y) * rows + row;
        if (threadIdx.x == 0) {
          const unsigned before = atomicAdd(arrived, 1u);
          last_arrived = before == unsigned(last_block - first_block);
          if (last_arrived) *arrived = 0;
        }
        __syncthreads();
        if (last_arrived) {
          __threadfence();
          for (int r = warp; r < used; r += Warps) {
            const offset_t base = (offset_t(blockIdx.y) * slots + first_block + row) * rows_per_block + r;
            const index_t parts = last_block - first_block + 1;
            float top = -infinity;
            for (index_t part = lane; part < parts; part += 32) {
              top = fmaxf(top, __ldcg(&scratch.state[base + offset_t(part) * rows_per_block]).x);
            }
            for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
            // A lane owns every 32nd group of four values. Parts are read several at a time: one after the other, their
            // latencies were most of a short step.
            constexpr int groups = (Dv / 4 + 31) / 32;
            float sum = 0;
            float4 merged[groups] = {};
#pragma unroll 8
            for (index_t part = 0; part < parts; ++part) {
              const offset_t place = base + offset_t(part) * rows_per_block;
              const float2 of = __ldcg(&scratch.state[place]);
              const float factor = top == -infinity ? 1.0f : exp2f(of.x - top);
              sum += of.y * factor;
#pragma unroll
              for (int i = 0; i < groups; ++i) {
                if (i * 32 + lane >= Dv / 4) continue;
                const float4 x = __ldcg(reinterpret_cast<const float4*>(scratch.out + place * Dv) + i * 32 + lane);
                merged[i].x += x.x * factor;
                merged[i].y += x.y * factor;
                merged[i].z += x.z * factor;
                merged[i].w += x.w * factor;
              }
            }
            float* values = out_of(warp);  // every warp is done with its ring
#pragma unroll
            for (int i = 0; i < groups; ++i) {
              if (i * 32 + lane < Dv / 4) reinterpret_cast<float4*>(values)[i * 32 + lane] = merged[i];
            }
            __syncwarp();
            write_row(
                p, at.sequence, (first_query + r) / group, at.head * group + (first_query + r) % group, top, sum,
                [&](int d) { return values[d]; }, lane);
            __syncwarp();
          }
        }
      }
      __syncthreads();
      begin = stop;
    }
  }
};

template <class View, int Warps, int Stages>
__global__ void __launch_bounds__(Warps * 32)
    decode_entry(const __grid_constant__ decode_problem<View> problem, decode_scratch scratch) {
  decode_kernel<View, Warps, Stages>::run(problem, scratch);
}

}  // namespace detail

}  // namespace cuda
TESSERA_NAMESPACE_END
