// The attention kernel over latent rows (MLA): one row is key and value, and many query heads share it. Hopper alone.
#pragma once

#include "latent_block.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Two groups of four warps compute, and four warps copy. The groups take turns at tiles: one multiplies the queries
/// with a tile's keys and makes weights of the logits, which the other gets through shared memory. Each multiplies the
/// weights of all tiles with its half of the values' elements, which lie where the keys do. Rows are cut evenly among
/// blocks; each block with a part of a row merges some of its query rows once all parts are there.
/// Cost     a tile takes 36 products of 64 x 64 x 16, and 8 of 64 x 128 x 16 of each group.
/// Bound    by the copy of the next tile but one, which takes 2,000 clocks from when its place is free: DeepSeek's 128
///          heads, 8 sequences of 32,768 tokens, take 189 us (H200, CUDA 13.0). Slower: both groups at one tile, half
///          of its keys each, 198 us, because all products wait for all weights; tiles in two halves, each with a
///          barrier, 199.
template <class View, class Out>
struct latent_kernel : latent_block<View, Out> {
  using base = latent_block<View, Out>;
  using base::base;
  using base::block_rows, base::computers, base::copiers, base::D, base::Dv, base::group_dims, base::part_bytes;
  using base::first_query, base::group, base::memory, base::p, base::piece, base::pieces, base::query_block,
      base::scratch;
  using base::hides, base::leave, base::masked, base::stages, base::tile, base::units, base::used, base::weights;
  using base::warp_uniform, base::position_of, base::queries, base::shared, base::stage_at, base::swizzled,
      base::tiles_of;
  using base::weights_at, base::tile_bytes;
  using typename base::segment, typename base::T;

  /// Named barriers: a warp of a group tells the same warp of the other one (1 to 8), a group meets (9, 10), both do.
  static constexpr int told_barrier = 1, group_barrier = 9, merge_barrier = 11;
  __device__ static void meet() { numbered_barrier<merge_barrier, computers>::wait(); }
  /// A group meets; returns whether `value` holds for all of its threads.
  __device__ static bool group_and(int half, bool value) {
    int all;
    asm volatile(
        "{\n.reg .pred own, every;\nsetp.ne.b32 own, %1, 0;\n"
        "barrier.cta.red.and.pred every, %2, %3, own;\nselp.b32 %0, 1, 0, every;\n}\n"
        : "=r"(all)
        : "r"(int(value)), "r"(group_barrier + half), "n"(computers / 2)
        : "memory");
    return warp_uniform(all != 0);
  }
  /// An operand whose groups of eight rows lie 1024 bytes apart; of transposed ones, 64 elements `apart` bytes.
  __device__ static std::uint64_t operand(std::uint32_t address, int apart = 16) {
    const std::uint32_t low = __shfl_sync(~0u, address / 16 | std::uint32_t(apart / 16) << 16, 0);
    return std::uint64_t(low) | 64ull << 32 | 1ull << 62;
  }

  /// Query rows lane / 4 + {0, 8} of a warp's sixteen.
  struct running {
    float out[2][16][4] = {};
    float max[2] = {-infinity, -infinity}, sum[2] = {};
  };
  using logits = float[8][4];
  using weight_rows = std::uint32_t[tile / 16][4];  // the left side of products with values

  __device__ __forceinline__ void multiply_keys(logits& s, int stage) const {
    const std::uint64_t q = operand(queries()), k = operand(stage_at(stage));
    begin_products();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const std::uint64_t by = std::uint64_t((step / 4 * part_bytes + step % 4 * 32) / 16);
      multiply_shared_async<T>(s, q + by, k + by, step > 0);
    }
    commit_products();
  }
  __device__ __forceinline__ void multiply_values(const weight_rows& w, int stage, int half, running& state) const {
    begin_products();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::uint64_t v = operand(stage_at(stage) + std::uint32_t((half * 4 + h * 2) * part_bytes), part_bytes);
#pragma unroll
      for (int k = 0; k < tile / 16; ++k) {
        multiply_async<T, 128, true>(state.out[h], w[k], v + std::uint64_t(k * 16 * 128 / 16));
      }
    }
    commit_products();
  }

  /// Whether a group's half of all values of a tile is finite. The group calls it together.
  __device__ bool values_are_finite(int stage, int half) const {
    const auto* from = reinterpret_cast<const uint4*>(memory + (1 + stage) * tile_bytes + half * 4 * part_bytes);
    constexpr std::uint32_t exponent = std::is_same_v<T, bf16> ? 0x7f80u : 0x7c00u;
    bool finite = true;
    for (int i = int(threadIdx.x) % 128; i < 4 * part_bytes / 16; i += 128) {
      const uint4 eight = from[i];
      for (const std::uint32_t two : {eight.x, eight.y, eight.z, eight.w})
        finite &= (two & exponent) != exponent && (two >> 16 & exponent) != exponent;
    }
    return group_and(half, finite);
  }
  /// Adds weights times values one by one to a lane's outputs: a weight of 0 adds nothing, even where the value is not
  /// finite.
  __device__ __noinline__ void add_visible_values(int stage, int half, int first_of_warp, int lane,
                                                  float (&out)[32][4]) const {
    const auto* values = memory + (1 + stage) * tile_bytes;
#pragma unroll 1
    for (int token = 0; token < tile; ++token) {
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_of_warp + r * 8 + lane / 4;
        w[r] = float(*reinterpret_cast<const T*>(memory + weights_at + swizzled(row, token / 8) + token % 8 * 2));
      }
#pragma unroll
      for (int n = 0; n < 32; ++n) {
        const int dim = half * group_dims + n * 8 + lane % 4 * 2;
        const auto* v =
            reinterpret_cast<const T*>(values + dim / 64 * part_bytes + swizzled(token, dim % 64 / 8) + dim % 8 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (w[i / 2] != 0) out[n][i] += w[i / 2] * float(v[i % 2]);
        }
      }
    }
  }
  /// The same, with a copy of the outputs, so that they stay in registers elsewhere.
  __device__ __forceinline__ void add_visible_values_aside(int stage, int half, int first_of_warp, int lane,
                                                           running& state) const {
    float copy[32][4];
#pragma unroll
    for (int i = 0; i < 128; ++i) copy[i / 4][i % 4] = state.out[i / 64][i / 4 % 16][i % 4];
    add_visible_values(stage, half, first_of_warp, lane, copy);
#pragma unroll
    for (int i = 0; i < 128; ++i) state.out[i / 64][i / 4 % 16][i % 4] = copy[i / 4][i % 4];
  }

  /// Caps and masks the logits of a tile; they are in base 2 then.
  __device__ __noinline__ void apply_rule(logits& s, int stage, index_t sequence, int first_of_warp, int lane,
                                          float scale) const {
    for (int r = 0; r < 2; ++r) {
      const index_t query = position_of(sequence, first_query + first_of_warp + r * 8 + lane / 4);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const index_t key = shared.positions[stage][i / 2 * 8 + lane % 4 * 2 + i % 2];
        float& x = s[i / 2][r * 2 + i % 2];
        x = p.rule.visible(query, key) ? quick_cap(p.rule, x * scale) * log2e : -infinity;
      }
    }
  }

  __device__ std::uint32_t weights_of(int first_of_warp, int lane) const {
    return weights() + swizzled(first_of_warp + lane % 16, lane / 16);
  }
  /// Turns the logits of a tile, which times `scale2` are in base 2, into weights, also in shared memory. What a row
  /// has so far is to be rescaled, by `shrink`, only once its largest logit has grown by more than 8: weights are at
  /// most 2^8 then. No branches: products of the previous tile may be running.
  __device__ __forceinline__ void weigh(const logits& s, float scale2, int first_of_warp, int lane, running& state,
                                        float (&shrink)[2], weight_rows& w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -infinity;
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(s[n][r * 2], s[n][r * 2 + 1]));
      top = lanes_max<4>(top) * scale2;
      const bool grows = top > state.max[r] + 8;
      const float largest = grows ? top : state.max[r], reference = softmax_reference(largest);
      shrink[r] = grows ? power_of_two(state.max[r] - reference) : 1.0f;
      state.max[r] = largest;
      float more = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float x = power_of_two(fmaf(s[n][r * 2], scale2, -reference)),
                    y = power_of_two(fmaf(s[n][r * 2 + 1], scale2, -reference));
        more += x + y;
        w[n / 2][n % 2 * 2 + r] = pack_pair<T>(x, y);
      }
      state.sum[r] = state.sum[r] * shrink[r] + more;
      shared.references[first_of_warp + r * 8 + lane / 4] = largest;
      shared.shrinks[first_of_warp + r * 8 + lane / 4] = shrink[r];
    }
#pragma unroll
    for (int k = 0; k < tile / 16; ++k) {
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       weights_of(first_of_warp, lane) ^ std::uint32_t(k * 32)),
                   "r"(w[k][0]), "r"(w[k][1]), "r"(w[k][2]), "r"(w[k][3])
                   : "memory");
    }
  }
  /// Tells the same warp of the other group that the weights of a tile lie in shared memory.
  __device__ static void tell_weights(int half, int warp) {
    __syncwarp();
    arrive_at(told_barrier + half * 4 + warp % 4, 64);
  }
  /// Waits for the other group's weights of a tile, and takes them.
  __device__ __forceinline__ void take_weights(int half, int warp, int first_of_warp, int lane, running& state,
                                               weight_rows& w) const {
    wait_at(told_barrier + (1 - half) * 4 + warp % 4, 64);
#pragma unroll
    for (int k = 0; k < tile / 16; ++k) load_matrices(w[k], weights_of(first_of_warp, lane) ^ std::uint32_t(k * 32));
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shrink[r] = shared.shrinks[first_of_warp + r * 8 + lane / 4];
      state.max[r] = shared.references[first_of_warp + r * 8 + lane / 4];
      state.sum[r] *= shrink[r];
    }
    __syncwarp();
    rescale(shrink, state);
  }
  __device__ __forceinline__ static void rescale(const float (&shrink)[2], running& state) {
    if (!__any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) state.out[i / 64][i / 4 % 16][i % 4] *= shrink[i % 4 / 2];
  }
  __device__ __forceinline__ static void settle_outputs(running& state) {
    settle(state.out[0]);
    settle(state.out[1]);
  }
  /// Adds weights times a group's half of the values of a tile, whose weights also lie in shared memory.
  __device__ __forceinline__ void add_values(const weight_rows& w, int stage, int seen, int half, int first_of_warp,
                                             int lane, running& state) const {
    if ((seen & hides) && !values_are_finite(stage, half)) {
      add_visible_values_aside(stage, half, first_of_warp, lane, state);
      return;
    }
    settle_outputs(state);
    multiply_values(w, stage, half, state);
    wait_products<0>();
    settle_outputs(state);
  }
  __device__ int sight_of(int stage) const { return warp_uniform(shared.sight[stage][0] | shared.sight[stage][1]); }

  /// The groups take turns: one multiplies the queries with the keys of a tile while the other makes weights of the
  /// previous tile's logits. Each then multiplies the weights of both with its half of the values.
  __device__ void attend(const segment& s, index_t& used_stages, index_t& used_queries, float scale) {
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, half = warp_uniform(warp / 4);
    const int first_of_warp = warp % 4 * 16;
    running state;
    weight_rows own, other;
    wait_phase(shared_address(&shared.queries_filled), std::uint32_t(used_queries) & 1);
    ++used_queries;
    index_t use = used_stages + half;  // of tile t
#pragma unroll 1
    for (index_t t = s.first + half; t < s.last; t += 2, use += 2) {
      const int stage = int(use % stages), before = int((use + 1) % stages);
      const std::uint32_t filled = shared_address(&shared.filled[stage]), turn = std::uint32_t(use / stages) & 1;
      // The other group has the tile before, whose values are still to be added: now, if this tile is not there yet, so
      // that a later one can be copied; else beside this tile's weights.
      bool pending = t > s.first;
      if (pending && !group_and(half, phase_ended(filled, turn))) {
        take_weights(half, warp, first_of_warp, lane, state, other);
        add_values(other, before, sight_of(before), half, first_of_warp, lane, state);
        leave(shared.freed[before]);
        pending = false;
      }
      logits now;
      wait_phase(filled, turn);
      settle(now);
      multiply_keys(now, stage);
      wait_products<0>();
      settle(now);
      const int seen = sight_of(stage);
      const bool plain = !(seen & masked) && p.rule.soft_cap <= 0;
      float shrink[2];
      if (pending) take_weights(half, warp, first_of_warp, lane, state, other);
      const int seen_before = pending ? sight_of(before) : 0;
      if (pending && plain && !(seen_before & hides)) {  // weights are made beside the previous tile's products
        settle_outputs(state);
        multiply_values(other, before, half, state);
        weigh(now, scale * log2e, first_of_warp, lane, state, shrink, own);
        tell_weights(half, warp);
        wait_products<0>();
        settle_outputs(state);
        leave(shared.freed[before]);
      } else {
        if (pending) {
          add_values(other, before, seen_before, half, first_of_warp, lane, state);
          leave(shared.freed[before]);
        }
        if (!plain) {
          logits ruled;
#pragma unroll
          for (int i = 0; i < 32; ++i) ruled[i / 4][i % 4] = now[i / 4][i % 4];
          apply_rule(ruled, stage, s.sequence, first_of_warp, lane, scale);
#pragma unroll
          for (int i = 0; i < 32; ++i) now[i / 4][i % 4] = ruled[i / 4][i % 4];
        }
        weigh(now, plain ? scale * log2e : 1.0f, first_of_warp, lane, state, shrink, own);
        __syncwarp();
        if (!(seen & hides)) tell_weights(half, warp);
      }
      rescale(shrink, state);
      add_values(own, stage, seen, half, first_of_warp, lane, state);
      if (seen & hides) tell_weights(half, warp);  // only now: the other group's next weights take their place
      leave(shared.freed[stage]);
    }
    const index_t tiles = s.last - s.first;
    used_stages += tiles;
    if ((tiles - 1) % 2 != half) {  // the last tile was the other group's
      const int stage = int((used_stages - 1) % stages);
      take_weights(half, warp, first_of_warp, lane, state, other);
      add_values(other, stage, sight_of(stage), half, first_of_warp, lane, state);
      leave(shared.freed[stage]);
    }
    leave(shared.queries_freed);
    write(s, half, first_of_warp, lane, state);
  }

  /// The factor that turns a query row's sum into its output. The leader writes the log-sum-exp.
  __device__ float finish(const segment& s, int row, float max2, float sum, bool leader) const {
    const index_t query = first_query + row, token = query / group, q_head = s.head * group + query % group;
    const index_t lse_token = token - scratch.first_lse;
    return output_weight(p.rule, q_head, max2, sum,
                         leader && p.lse.data && lse_token >= 0 ? p.lse.row(s.sequence, lse_token, q_head) : nullptr);
  }
  __device__ Out* output(const segment& s, int row) const {
    const index_t query = first_query + row;
    return p.out.row(s.sequence, query / group, s.head * group + query % group);
  }
  /// Which part of a row this is, and how many there are.
  struct row_share {
    index_t first_piece, count;
  };
  /// A block has two places: for the part that ends a row or lies within one, and for the part that begins one.
  __device__ offset_t place_of(const row_share& share, index_t part) const {
    const offset_t block = offset_t(query_block) * index_t(gridDim.y) + share.first_piece + part;
    return (block * 2 + (part == 0 ? 1 : 0)) * block_rows;
  }
  __device__ row_share share_of(const segment& s) const {
    const even_pieces cut(units, pieces);
    const index_t first = cut.piece_of(s.row_begin);
    return {first, cut.piece_of(s.row_end - 1) - first + 1};
  }

  /// Writes a segment's outputs, or its part of them.
  __device__ void write(const segment& s, int half, int first_of_warp, int lane, running& state) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.sum[r] = lanes_sum<4>(state.sum[r]);
      if (lane % 4 == 0) shared.sums[half][first_of_warp + r * 8 + lane / 4] = state.sum[r];
    }
    meet();
    const bool whole = s.whole();
    const row_share share = whole ? row_share{} : share_of(s);
    const offset_t place = whole ? 0 : place_of(share, piece - share.first_piece);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_of_warp + r * 8 + lane / 4;
      const float sum = state.sum[r] + shared.sums[1 - half][row];
      if (row >= used) continue;
      if (whole) {
        const float weight = finish(s, row, state.max[r], sum, half == 0 && lane % 4 == 0);
        Out* to = output(s, row) + half * group_dims + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 32; ++n) {
          to[n * 8] = Out(state.out[n / 16][n % 16][r * 2] * weight);
          to[n * 8 + 1] = Out(state.out[n / 16][n % 16][r * 2 + 1] * weight);
        }
      } else {
        float* to = scratch.out + (place + row) * Dv + half * group_dims + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 32; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) =
              make_float2(state.out[n / 16][n % 16][r * 2], state.out[n / 16][n % 16][r * 2 + 1]);
        }
        if (half == 0 && lane % 4 == 0) scratch.state[place + row] = make_float2(state.max[r], sum);
      }
    }
    meet();
    if (!whole && threadIdx.x == 0) {
      __threadfence();
      add_acquire_release(counter(s), 1);
    }
  }
  __device__ unsigned* counter(const segment& s) const {
    return scratch.arrived + offset_t(query_block) * p.view.sequences * p.view.kv_heads + s.row;
  }

  /// Merges this block's share of the query rows of a row that several blocks have attended. It waits until all parts
  /// are there: blocks that are cut run at the same time.
  __device__ void merge(const segment& s) const {
    const row_share share = share_of(s);
    unsigned* const arrived = counter(s);
    if (threadIdx.x == 0) {
      while (index_t(load_acquire(arrived)) < share.count) continue;
    }
    meet();
    constexpr int quarters = Dv / 128, warps = computers / 32;
    const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
    // An item is a query row and a quarter of its outputs, four to a lane. Warps without an item of their own take a
    // share of another's parts.
    const index_t part = piece - share.first_piece;
    const int first = int(part * used * quarters / share.count), stop = int((part + 1) * used * quarters / share.count);
    int team = 1;
    while (team < warps && (stop - first) * team * 2 <= warps) team *= 2;
    const int member = warp % team, step = warps / team;
    const index_t each = (share.count + team - 1) / team, begin_part = member * each,
                  end_part = (min)(share.count, begin_part + each);
    auto* const shares = reinterpret_cast<float4*>(memory + weights_at);  // [warps, 32]
    for (int begin_item = first; begin_item < stop; begin_item += step) {
      const int item = begin_item + warp / team, row = item / quarters, dim = item % quarters * 128 + lane * 4;
      const bool busy = item < stop;
      float top = -infinity, sum = 0;
      float4 x{};
      if (busy) {
        for (index_t i = lane; i < share.count; i += 32)
          top = fmaxf(top, __ldcg(scratch.state + place_of(share, i) + row).x);
        top = warp_max(top);
        const float reference = softmax_reference(top);
#pragma unroll 8
        for (index_t i = begin_part; i < end_part; ++i) {
          const offset_t place = place_of(share, i) + row;
          const float2 state = __ldcg(scratch.state + place);
          const float4 y = __ldcg(reinterpret_cast<const float4*>(scratch.out + place * Dv + dim));
          const float factor = power_of_two(state.x - reference);
          sum += state.y * factor;
          x.x += y.x * factor, x.y += y.y * factor, x.z += y.z * factor, x.w += y.w * factor;
        }
      }
      if (team > 1) {
        if (member > 0) shares[warp * 32 + lane] = x;
        if (lane == 0) shared.sums[0][warp] = sum;
        meet();
        for (int other = 1; member == 0 && other < team; ++other) {
          const float4 y = shares[(warp + other) * 32 + lane];
          x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
          sum += shared.sums[0][warp + other];
        }
      }
      if (!busy || member > 0) continue;
      const float weight = finish(s, row, top, sum, dim == 0);
      Out* to = output(s, row) + dim;
      to[0] = Out(x.x * weight), to[1] = Out(x.y * weight), to[2] = Out(x.z * weight), to[3] = Out(x.w * weight);
    }
    meet();
    // The last block to leave clears the counter for the next launch.
    if (threadIdx.x == 0 && index_t(add_acquire_release(arrived, 1)) == 2 * share.count - 1) *arrived = 0;
  }

  /// Rows that see nothing have no tile, and so no block.
  __device__ void write_empty_rows() const {
    for (index_t row = piece; row < p.view.sequences * p.view.kv_heads; row += index_t(gridDim.y)) {
      if (tiles_of(row) > 0) continue;
      segment s{};
      s.sequence = row / p.view.kv_heads, s.head = row % p.view.kv_heads;
      for (int i = int(threadIdx.x); i < used * Dv; i += computers) {
        const int r = i / Dv, d = i % Dv;
        output(s, r)[d] = Out(0.0f * finish(s, r, -infinity, 0, d == 0));
      }
    }
  }

  __device__ void run() {
    if (threadIdx.x == 0) {
      init_barrier(shared_address(&shared.queries_filled), copiers);
      init_barrier(shared_address(&shared.queries_freed), computers);
      for (int i = 0; i < stages; ++i) {
        init_barrier(shared_address(&shared.filled[i]), copiers);
        init_barrier(shared_address(&shared.freed[i]), computers);
      }
    }
    base::plan();
    if (int(threadIdx.x) >= computers) {
      give_registers<base::copier_registers>();
      base::copy_all();
      return;
    }
    take_registers<base::computer_registers>();
    const float scale = p.rule.scale_for(D);
    index_t used_stages = 0, used_queries = 0;
    base::for_each_segment([&](const segment& s) { attend(s, used_stages, used_queries, scale); });
    write_empty_rows();
    base::for_each_segment([&](const segment& s) {
      if (!s.whole()) merge(s);
    });
  }
};

/// Registers of a thread at first, of which the copying warps give some to the computing ones.
template <class View, class Out>
__global__ void __launch_bounds__(compiled_for_hopper ? latent_kernel<View, Out>::threads : 32, 1)
    latent_entry(const __grid_constant__ decode_problem<View, Out> problem,
                 const __grid_constant__ latent_scratch scratch) {
  if constexpr (compiled_for_hopper) {
    extern __shared__ __align__(1024) unsigned char latent_memory[];
    touch_parameter(problem);
    wait_for_earlier();
    latent_kernel<View, Out>(problem, scratch, latent_memory).run();
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
