// Attention over the slots that a cluster of thread blocks has just chosen, at the end of the same launch.
#pragma once

#include "../../../attend/attention_problems.cuh"
#include "../../../attend/decode/decode_attention.cuh"
#include "page_cluster.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Shared memory after that of the choice. Chosen slots are dealt to the blocks in tiles of 16. A warp stages one tile
/// at a time, over the memory of the choice's columns, and leaves its result there.
/// Slower: four warps per tile where a block has few tiles, by 0.5 us of 15.4 (H200, CUDA 13.0, B1 32K, 1,024 tokens).
template <class View>
struct cluster_attention {
  using T = typename View::element_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = 16, max_rows = cluster_rows;
  static constexpr int k_bytes = tokens * staged_rows{D / 8}.bytes(), v_bytes = tokens * staged_rows{Dv / 8}.bytes();
  static constexpr int pitch = Dv + 4;  // floats of an output row
  static constexpr int warp_bytes = k_bytes + v_bytes;
  static_assert(max_rows * (pitch + 2) * int(sizeof(float)) <= warp_bytes);

  TESSERA_HD static constexpr std::size_t slots_at(std::size_t choice_bytes) {
    constexpr std::size_t rings = std::size_t(cluster_warps) * warp_bytes;
    return choice_bytes > rings ? (choice_bytes + 15) / 16 * 16 : rings;
  }
  TESSERA_HD static constexpr std::size_t parts_at(std::size_t choice_bytes, index_t max_chosen, int blocks) {
    const std::size_t tiles = (std::size_t(max_chosen) + tokens - 1) / tokens;
    return slots_at(choice_bytes) + (tiles + std::size_t(blocks) - 1) / std::size_t(blocks) * tokens * sizeof(index_t);
  }
  /// How many rows a block finishes: every `blocks`-th.
  TESSERA_HD static constexpr index_t rows_each(index_t rows, int blocks) { return (rows + blocks - 1) / blocks; }
  TESSERA_HD static constexpr std::size_t bytes(std::size_t choice_bytes, index_t max_chosen, index_t rows,
                                                int blocks) {
    return parts_at(choice_bytes, max_chosen, blocks) +
           std::size_t(rows_each(rows, blocks)) * std::size_t(blocks) * (Dv * sizeof(float) + sizeof(float2));
  }
};

/// One warp's softmax over tiles of 16 tokens, for up to 8 query rows; keys are the rows of the product. Lane l has
/// rows 2 (l % 4) and 2 (l % 4) + 1, of tokens l / 4 and l / 4 + 8, and of output dims l / 4 and l / 4 + 8 of every
/// sixteen.
template <class View>
struct cluster_state {
  using T = typename View::element_type;
  using sizes = cluster_attention<View>;
  static constexpr int D = View::k_dim, Dv = View::v_dim;
  float out[Dv / 16][4] = {};
  float top[2] = {-infinity, -infinity}, sum[2] = {};  // base 2

  /// `logit_of(high, r, product)` gives the base-2 logit of token l / 4 + 8 * high and row 2 (l % 4) + r. The tile's
  /// keys have arrived; its values have arrived after `wait_for_values()`.
  template <class LogitOf, class Wait>
  __device__ void read(const std::uint32_t (&q)[D / 16][2], std::uint32_t tile, const LogitOf& logit_of, int lane,
                       const Wait& wait_for_values) {
    float s[4] = {};
    constexpr int at_once = 2;  // loads before the first product that waits for one
#pragma unroll
    for (int first = 0; first < D / 16; first += at_once) {
      std::uint32_t a[at_once][4];
#pragma unroll
      for (int i = 0; i < at_once && first + i < D / 16; ++i) {
        load_matrices(a[i], tile + staged_rows{D / 8}.offset(lane % 16, (first + i) * 2 + lane / 16));
      }
#pragma unroll
      for (int i = 0; i < at_once && first + i < D / 16; ++i) multiply<T>(s, a[i], q[first + i][0], q[first + i][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = logit_of(i / 2, i % 2, s[i]);
    float2 tile_top = make_float2(fmaxf(s[0], s[2]), fmaxf(s[1], s[3]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float x = __shfl_xor_sync(~0u, tile_top.x, step), y = __shfl_xor_sync(~0u, tile_top.y, step);
      tile_top.x = fmaxf(tile_top.x, x), tile_top.y = fmaxf(tile_top.y, y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const softmax_rise rise(top[r], r ? tile_top.y : tile_top.x);
      s[r] = rise.weight(s[r]), s[r + 2] = rise.weight(s[r + 2]);
      sum[r] = sum[r] * rise.shrink + s[r] + s[r + 2];
      if (rise.largest != top[r]) {
#pragma unroll
        for (int m = 0; m < Dv / 16; ++m) out[m][r] *= rise.shrink, out[m][r + 2] *= rise.shrink;
      }
      top[r] = rise.largest;
    }
    wait_for_values();
    const std::uint32_t b0 = transposed(pack_pair<T>(s[0], s[1])), b1 = transposed(pack_pair<T>(s[2], s[3]));
#pragma unroll
    for (int first = 0; first < Dv / 16; first += at_once) {
      std::uint32_t a[at_once][4];
#pragma unroll
      for (int i = 0; i < at_once && first + i < Dv / 16; ++i) {
        load_matrices_transposed(
            a[i], tile + std::uint32_t(sizes::k_bytes) +
                      staged_rows{Dv / 8}.offset(lane / 16 * 8 + lane % 8, (first + i) * 2 + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < at_once && first + i < Dv / 16; ++i) multiply<T>(out[first + i], a[i], b0, b1);
    }
  }

  /// Leaves the outputs and, behind them, maximum and sum of the first `rows` rows.
  __device__ void store(float* outs, index_t rows, int lane) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float x = __shfl_xor_sync(~0u, sum[0], step), y = __shfl_xor_sync(~0u, sum[1], step);
      sum[0] += x, sum[1] += y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane % 4 * 2 + r;
      if (row >= rows) continue;
#pragma unroll
      for (int m = 0; m < Dv / 16; ++m) {
        outs[row * sizes::pitch + m * 16 + lane / 4] = out[m][r];
        outs[row * sizes::pitch + m * 16 + lane / 4 + 8] = out[m][r + 2];
      }
      if (lane < 4) reinterpret_cast<float2*>(outs + sizes::max_rows * sizes::pitch)[row] = make_float2(top[r], sum[r]);
    }
  }
};

/// Starts to copy the rows of 16 tokens, 16 bytes a lane. Lane t knows the address of the t-th row. Each step must
/// fetch this code anew, so short code is faster: with both loops fully unrolled a step takes 15.6 us, unrolled by four
/// 14.9, by two 14.8 (H200, CUDA 13.0, B1 32K).
template <class T, int Chunks>
__device__ void copy_tile(const T* mine, index_t valid, std::uint32_t to, int lane) {
#pragma unroll 2
  for (int i = 0; i < 16 * Chunks / 32; ++i) {
    const int id = i * 32 + lane, token = id / Chunks, chunk = id % Chunks;
    const auto* from = reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), token));
    copy_async16(to + staged_rows{Chunks}.offset(token, chunk), from + chunk * 8, token < valid);
  }
}

/// Attends the slots of one row that a group of blocks has chosen. Each block attends its tiles, then finishes some of
/// the query rows.
template <class View, class Out, bool Alone>
struct chosen_attention {
  using T = typename View::element_type;
  using attention = cluster_attention<View>;
  using blocks_of = block_group<Alone>;
  static constexpr int D = View::k_dim, Dv = View::v_dim, tokens = attention::tokens;

  const page_problem<View>& p;
  const page_choice& c;
  cluster_query<D>& queries;
  float (&factors)[attention::max_rows][cluster_warps];
  unsigned char* const bytes;
  index_t* const block_slots;  // slots of this block's tiles, one tile after the other
  float* const part_out;       // [own rows, blocks, Dv]: each block's partial outputs
  float2* const part_state;    // [own rows, blocks]: maximum and sum
  const index_t head = index_t(blockIdx.y), sequence = index_t(blockIdx.z), rows = c.tokens * c.group;
  index_t* const chosen = c.out + (sequence * p.view.kv_heads + head) * c.out_stride;  // the row's choice
  const int thread = int(threadIdx.x), lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0);
  const int rank = blocks_of::rank(), blocks = blocks_of::blocks(), log_blocks = blocks_of::log_blocks();

  __device__ float* outs_of(int w) const { return reinterpret_cast<float*>(bytes + w * attention::warp_bytes); }

  /// `put`: the blocks hold the chosen slots; otherwise the slots lie in device memory only. `sent`: arriving slots are
  /// counted, and `read` are expected in all. `newest`: the position of the newest stored token.
  __device__ void run(bool put, bool sent, index_t read, index_t newest, const rows_view<Out>& out,
                      const rows_view<float>& lse) const {
    if (!sent) blocks_of::arrive();
    const index_t position = p.first_position[sequence];
    std::uint32_t q[D / 16][2];
    load_queries(q);
    if (!sent) blocks_of::wait();  // the choice is complete, also in device memory
    const index_t count = sent ? read : c.counts[sequence * p.view.kv_heads + head];
    const index_t tiles = ceil_div(count, index_t(tokens)), own_tiles = (tiles - rank + blocks - 1) >> log_blocks;
    if (sent) {
      const bool has_last = ((tiles - 1) & (blocks - 1)) == rank;
      const index_t held = own_tiles * tokens - (has_last ? tiles * tokens - count : 0);
      if (thread == 0) blocks_of::expect(queries.slots, held * index_t(sizeof(index_t)));
      __syncthreads();  // no warp reads keys any more from the memory of the tiles; a block alone has its slots
      if constexpr (!Alone) blocks_of::wait_for(queries.slots);
    }
    const bool plain = p.rule.soft_cap <= 0 && p.rule.sliding_window <= 0 && newest <= position;
    read_tiles(q, position, plain, count, own_tiles, put);
    const int active = int((min)(own_tiles, index_t(cluster_warps)));
    __syncthreads();  // all warps have stored the results of their tiles
    send_parts(active);
#pragma unroll 1
    for (index_t i = thread; put && i < own_tiles * tokens; i += cluster_threads) {
      const index_t place = ((i / tokens << log_blocks) + rank) * tokens + i % tokens;
      if (place < count) chosen[place] = block_slots[i];
    }
    const index_t own_rows = (rows - rank + blocks - 1) >> log_blocks;
    if (own_rows <= 0) return;
    if (thread == 0)
      blocks_of::expect(queries.outputs, own_rows * blocks * index_t(Dv * sizeof(float) + sizeof(float2)));
    blocks_of::wait_for(queries.outputs);  // all blocks' parts of this block's rows have arrived
    finish_rows(own_rows, out, lse);
  }

 private:
  /// Loads queries as the second operand of products: lane l has row l / 4; results of rows beyond the last are
  /// dropped.
  __device__ void load_queries(std::uint32_t (&q)[D / 16][2]) const {
    const index_t r = lane / 4 < rows ? lane / 4 : 0, token = c.by_group.quotient(r);
    const auto* const from = reinterpret_cast<const std::uint32_t*>(
        p.q.row(sequence, token, head * c.group + r - token * c.group) + lane % 4 * 2);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) q[step][0] = from[step * 8], q[step][1] = from[step * 8 + 4];
  }

  /// Attends a warp's tiles of chosen tokens and leaves the result in shared memory. `plain`: every row sees every
  /// token, and no logit is capped.
  __device__ void read_tiles(const std::uint32_t (&q)[D / 16][2], index_t position, bool plain, index_t count,
                             index_t own_tiles, bool put) const {
    const std::uint32_t ring = shared_address(outs_of(warp));
    cluster_state<View> state;
    const float scale = p.rule.scale_for(D);
#pragma unroll 1
    for (index_t i = warp; i < own_tiles; i += cluster_warps) {
      const index_t first = ((i << log_blocks) + rank) * tokens, valid = (min)(index_t(tokens), count - first);
      const index_t at = (min)(index_t(lane % tokens), valid - 1),
                    slot = put ? block_slots[i * tokens + at] : chosen[first + at];
      const T* const k = p.view.key(sequence, head, slot);
      const T* const v = p.view.value(sequence, head, slot);
      const index_t held = p.view.positions ? p.view.position(sequence, head, slot) : slot;
      __syncwarp();
      copy_tile<T, D / 8>(k, valid, ring, lane);
      commit_copies();
      copy_tile<T, Dv / 8>(v, valid, ring + std::uint32_t(attention::k_bytes), lane);
      commit_copies();
      const index_t position_of[2] = {__shfl_sync(~0u, held, lane / 4), __shfl_sync(~0u, held, lane / 4 + 8)};
      wait_copies<1>();
      __syncwarp();
      state.read(
          q, ring,
          [&](int high, int r, float product) {
            const bool there = lane / 4 + high * 8 < valid;
            if (plain) return there ? product * (scale * log2e) : -infinity;
            const index_t query = position + c.by_group.quotient(lane % 4 * 2 + r);
            const bool seen = there && p.rule.visible(query, position_of[high]);
            return seen ? quick_cap(p.rule, product * scale) * log2e : -infinity;
          },
          lane,
          [] {
            wait_copies<0>();
            __syncwarp();
          });
      __syncwarp();
    }
    if (warp < own_tiles) state.store(outs_of(warp), rows, lane);
  }

  /// Merges what the warps left of every row, and sends it to the block that finishes the row.
  __device__ void send_parts(int active) const {
    if (warp < rows) {  // a row's factors by a warp, one a lane
      const float2 part =
          lane < active ? reinterpret_cast<const float2*>(outs_of(lane) + attention::max_rows * attention::pitch)[warp]
                        : make_float2(-infinity, 0);
      const float top = warp_max(part.x), factor = power_of_two(part.x - softmax_reference(top));
      const float sum = warp_sum(part.y * factor);
      if (lane < cluster_warps) factors[warp][lane] = factor;
      if (lane == 0) {
        blocks_of::send(part_state + (warp >> log_blocks) * blocks + rank, warp & (blocks - 1), make_float2(top, sum),
                        queries.outputs);
      }
    }
    __syncthreads();  // the factors are there
#pragma unroll 1
    for (int i = thread * 4; i < rows * Dv; i += cluster_threads * 4) {
      const int r = i / Dv, d = i % Dv;
      float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int w = 0; w < active; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(outs_of(w) + r * attention::pitch + d);
        const float factor = factors[r][w];
        x.x += part.x * factor, x.y += part.y * factor, x.z += part.z * factor, x.w += part.w * factor;
      }
      blocks_of::send(reinterpret_cast<float4*>(part_out + ((r >> log_blocks) * blocks + rank) * Dv + d),
                      r & (blocks - 1), x, queries.outputs);
    }
  }

  __device__ void finish_rows(index_t own_rows, const rows_view<Out>& out, const rows_view<float>& lse) const {
    constexpr int max_parts = Alone ? 1 : max_cluster_blocks;
#pragma unroll 1
    for (int i = thread; i < own_rows * Dv; i += cluster_threads) {
      const int own_row = i / Dv, d = i % Dv;
      const index_t r = (own_row << log_blocks) + rank;
      float2 part[max_parts];
      float held[max_parts], top = -infinity, sum = 0, x = 0;
#pragma unroll
      for (int block = 0; block < max_parts; ++block) {
        const int place = own_row * blocks + block;
        part[block] = block < blocks ? part_state[place] : make_float2(-infinity, 0);
        held[block] = block < blocks ? part_out[place * Dv + d] : 0.0f;
        top = fmaxf(top, part[block].x);
      }
#pragma unroll
      for (int block = 0; block < max_parts; ++block) {
        const float factor = power_of_two(part[block].x - softmax_reference(top));
        x += held[block] * factor;
        sum += part[block].y * factor;
      }
      const index_t token = c.by_group.quotient(r), q_head = head * c.group + r - token * c.group;
      const float weight =
          output_weight(p.rule, q_head, top, sum, d == 0 && lse.data ? lse.row(sequence, token, q_head) : nullptr);
      out.row(sequence, token, q_head)[d] = Out(x * weight);
    }
  }
};

/// Chooses, then attends what was chosen, in one launch.
template <class View, class Scorer, class Out, bool Alone>
__global__ void __launch_bounds__(cluster_threads, 1)
    attend_pages_entry(const __grid_constant__ page_problem<View> p, Scorer scorer,
                       const __grid_constant__ page_choice c, const __grid_constant__ page_scratch to,
                       const __grid_constant__ cluster_layout layout, const __grid_constant__ rows_view<Out> out,
                       const __grid_constant__ rows_view<float> lse, index_t max_chosen) {
  using attention = cluster_attention<View>;
  using blocks_of = block_group<Alone>;
  constexpr int tokens = attention::tokens;
  extern __shared__ uint4 page_memory[];
  __shared__ page_choice_storage s;
  __shared__ cluster_query<View::k_dim> queries;
  __shared__ float factors[attention::max_rows][cluster_warps];
  auto* const bytes = reinterpret_cast<unsigned char*>(page_memory);
  auto* const block_slots = reinterpret_cast<index_t*>(bytes + attention::slots_at(layout.bytes));
  const bool known = c.unit == selection_unit::token;  // the number chosen is known: slots are counted as they arrive
  const cluster_choice<View, Scorer, Alone, true> choice{p, scorer, c, to, layout, s, queries};
  index_t read = 0, newest = 0;
  const bool put = choice.run(bytes, read, newest, [&](index_t place, index_t slot) {
    const index_t tile = place / tokens;
    index_t* const at = block_slots + (tile >> blocks_of::log_blocks()) * tokens + place % tokens;
    if (known)
      blocks_of::send(at, tile & (blocks_of::blocks() - 1), slot, queries.slots);
    else
      blocks_of::store(at, tile & (blocks_of::blocks() - 1), slot);
  });
  const int blocks = blocks_of::blocks();
  auto* const part_out = reinterpret_cast<float*>(bytes + attention::parts_at(layout.bytes, max_chosen, blocks));
  auto* const part_state =
      reinterpret_cast<float2*>(part_out + attention::rows_each(c.tokens * c.group, blocks) * blocks * View::v_dim);
  const chosen_attention<View, Out, Alone> attend{p, c, queries, factors, bytes, block_slots, part_out, part_state};
  attend.run(put, put && known, read, newest, out, lse);
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
