// The prefill attention kernel for Hopper: products of four warps at a time (wgmma), which only sm_90a has.
#pragma once

#include "../../device/barrier.cuh"
#include "dense_tiles.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View>
inline constexpr bool fits_hopper_prefill = (View::k_dim == 64 || View::k_dim == 128) &&
                                            (View::v_dim == 64 || View::v_dim == 128);

/// Two groups of four warps, 64 query rows each, and four warps that fetch, in boxes of the copy engine where they can. Queries
/// stay in registers; K and V stream through a ring of three tiles in rows of 128 bytes, their chunks exchanged as the product's
/// descriptors want it. A tile's values are multiplied behind the next tile's keys and beside its exponentials, and the groups take
/// turns at the products.
/// Lost (TFLOP/s, 16K causal, d 128, bf16, group 4, H200, CUDA 13.0; this gives 520): exponentials behind both products, which
/// were 64 columns wide, 500; so without turns 483; so with rows copied one by one 432; no warps that only fetch, and neither 470.
template <class View, class Out>
struct prefill_hopper_kernel : prefill_rows<View, Out, 8, 1, 128, 4> {
  using base = prefill_rows<View, Out, 8, 1, 128, 4>;
  using base::block_rows, base::D, base::Dv, base::tile, base::warp_rows, base::warps;
  using typename base::logits, typename base::place, typename base::problem_type, typename base::running;
  using typename base::T, typename base::weights;
  static constexpr int copiers = 128, computers = base::threads, threads = computers + copiers;
  using meeting = numbered_barrier<3, threads>;  // of both roles, each at its own place of the code; 1 and 2 are turns
  static constexpr int copier_registers = 40, computer_registers = 232;  // of the 168 that each thread begins with
  static constexpr int resident = 1, stages = 3, group_rows = 64, half_bytes = tile * 128;  // of 64 elements a token
  static constexpr int k_bytes = D / 64 * half_bytes, v_bytes = Dv / 64 * half_bytes, stage_bytes = k_bytes + v_bytes;
  /// What the rows see of a tile: of each group, and bits by chunk of slots and row where something is hidden.
  struct alignas(16) sight {
    enum : std::uint32_t { met = 1, masked = 2, by_rows = 4 };  // by_rows: written by threads, not in boxes
    std::uint32_t of_group[2], bits[base::tile_chunks][block_rows];
  };
  // The queries pass through the last stage of keys before it is first filled.
  static constexpr int flag_at = stages * (stage_bytes + int(sizeof(sight)) + 4 * 8), shared_bytes = flag_at + 16;
  static_assert(shared_bytes % 16 == 0, "tessera: what tiles keep lies behind, at a multiple of 16 bytes");
  static_assert(block_rows == tile && copiers == block_rows,
                "tessera: queries are laid out as a tile of keys, and each thread that fetches looks at one row");

  /// Where 16-byte chunk `chunk` of row `row` lies in a tensor of rows.
  __device__ static std::uint32_t swizzled(int row, int chunk) {
    return std::uint32_t(chunk / 8 * half_bytes + row * 128 + ((chunk ^ row) & 7) * 16);
  }
  /// Descriptor of an operand at `address`: groups of eight 128-byte rows, 1024 bytes apart, 128-byte swizzle. Of values the second
  /// 64 elements of a row lie `half_bytes` behind the first. To add n is to go 16 n bytes on.
  __device__ static std::uint64_t descriptor(std::uint32_t address, int apart = 16) {
    return std::uint64_t(address / 16) | std::uint64_t(apart / 16) << 16 | 64ull << 32 | 1ull << 62;
  }

  /// Where a tile lies in the ring, and the parity of its barriers.
  struct ring_place {
    int stage = 0;
    std::uint32_t parity = 0;
    __device__ void advance() {
      if (++stage == stages) stage = 0, parity ^= 1;
    }
  };
  /// Shared memory: keys, values, sights and barriers of each stage, and a flag. A tile's sight comes and goes with its keys.
  struct ring {
    unsigned char* memory;
    std::uint32_t shared;

    __device__ explicit ring(unsigned char* of_block) : memory(of_block), shared(shared_address(of_block)) {}
    __device__ std::uint32_t keys(int stage) const { return shared + std::uint32_t(stage * k_bytes); }
    __device__ std::uint32_t values(int stage) const {
      return shared + std::uint32_t(stages * k_bytes + stage * v_bytes);
    }
    __device__ sight& sight_of(int stage) const {
      return reinterpret_cast<sight*>(memory + stages * stage_bytes)[stage];
    }
    /// Did a value that a row must not see reach its output? Behind the barriers: static memory would cost 1 KiB of alignment.
    __device__ unsigned& any_spoilt() const { return *reinterpret_cast<unsigned*>(memory + flag_at); }
    __device__ std::uint32_t keys_filled(int stage) const {
      return shared + std::uint32_t(stages * (stage_bytes + int(sizeof(sight))) + stage * 8);
    }
    __device__ std::uint32_t keys_freed(int stage) const { return keys_filled(stage) + stages * 8; }
    __device__ std::uint32_t values_filled(int stage) const { return keys_filled(stage) + stages * 16; }
    __device__ std::uint32_t values_freed(int stage) const { return keys_filled(stage) + stages * 24; }
    __device__ void begin() const {
      for (int i = 0; i < stages; ++i) {
        init_barrier(keys_filled(i), 2 * copiers), init_barrier(keys_freed(i), computers);
        init_barrier(values_filled(i), copiers), init_barrier(values_freed(i), computers);
      }
      publish_barriers();  // the copy engine counts bytes at them
      any_spoilt() = 0;
    }
    __device__ std::uint32_t queries() const { return keys(stages - 1); }
  };

  template <class Tiles>
  __device__ static void run(const problem_type& p, const prefill_parts& parts, const row_maps& maps,
                             const typename Tiles::argument& argument) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tiles tiles(p, parts, argument, wide_memory + shared_bytes);
    const ring stored(wide_memory);
    if (threadIdx.x == 0) stored.begin();
    const index_t warp_row = tiles.first_row + warp * warp_rows;
    if (warp < warps) {
      base::copy_queries(p, tiles.at, warp_row, lane,
                         [&](int r, int chunk) { return stored.queries() + swizzled(warp * warp_rows + r, chunk); });
      commit_copies();
    }
    index_t count = tiles.gather(p);
    __syncthreads();  // the barriers are there
    // Goes on to the next piece, or to the first again if a value that a row must not see reached its output: only then are values
    // looked at, which takes as long as the products. All threads call it, each role in its place.
    bool careful = false;
    const auto next_piece = [&](bool spoilt) {
      if constexpr (!Tiles::one_piece) {
        if (tiles.has_more()) {
          count = tiles.gather(p);
          return true;
        }
      }
      if (careful) return false;
      if (spoilt) atomicOr(&stored.any_spoilt(), 1u);
      meeting::wait();
      if (!stored.any_spoilt()) return false;
      careful = true;
      tiles.rewind(p);
      count = tiles.gather(p);
      return true;
    };
    ring_place at;
    if (warp >= warps) {
      give_registers<copier_registers>();
      do {
        fetch(p, maps, tiles, stored, count, at);
      } while (next_piece(false));
    } else {
      take_registers<computer_registers>();
      wait_copies<0>();
      __syncwarp();
      std::uint32_t q[D / 16][4];
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        load_matrices(q[step], stored.queries() + swizzled(warp * warp_rows + lane % 16, step * 2 + lane / 16));
      }
      fence_async();  // boxes of keys are written there next
      arrive(stored.keys_freed(stages - 1));
      const typename base::logit_scale scale(p.rule);
      running state;
      if (warp / 4 == 1) end_turn(1);  // the first group begins
      bool again = true;
      while (true) {
        if (again) base::clear(state);
        attend(stored, q, scale, careful, count, at, state);
        bool spoilt = false;
#pragma unroll
        for (int i = 0; i < Dv / 2; ++i) spoilt = spoilt || state.out[0][i / 4][i % 4] != state.out[0][i / 4][i % 4];
        const bool was_careful = careful;
        if (!next_piece(spoilt)) break;
        again = careful != was_careful;
      }
      base::finish(p, parts, tiles.at, warp_row, lane, state);
    }
  }

 private:
  /// Arrives once a sum of weights is there: what follows is not waited for before, as the assembler would have it.
  __device__ static void arrive_after(std::uint32_t barrier, float sum) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.geu.f32 there, %1, 0f00000000;\n"
        "@there mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
        "f"(sum)
        : "memory");
  }
  /// A barrier for each group's turn at the products.
  __device__ static void wait_turn(int group) { wait_at(1 + group, computers); }
  __device__ static void end_turn(int group) { arrive_at(2 - group, computers); }

  /// Fetches the tiles of a piece, and says what each row sees of them: a thread looks at one row.
  template <class Tiles>
  __device__ static void fetch(const problem_type& p, const row_maps& maps, Tiles& tiles, const ring& stored,
                               index_t count, ring_place& at) {
    const int own = int(threadIdx.x) - computers, warp = own / 32;
    const index_t own_group = tiles.first_row + own / group_rows * group_rows;
    tiles.ask(p, own_group, group_rows);
    // Boxes of a tile's keys or values: a lane asks for one of them.
    const auto copy_boxes = [&](const CUtensorMap& map, index_t t, std::uint32_t to, int dim, std::uint32_t barrier) {
      if (own == 0)
        arrive_expecting(barrier, std::uint32_t(dim / 64 * half_bytes));
      else
        arrive(barrier);
      if (warp > 0) return;
      __syncwarp();
      const int boxes = tile / maps.box_rows;
      for (int i = threadIdx.x % 32; i < boxes * (dim / 64); i += 32) {
        const int half = i / boxes, row = i % boxes * maps.box_rows;
        const slot_address from = p.view.table.locate(tiles.at.sequence, tiles.at.head, tiles.slot_of(t, row));
        copy_box(to + std::uint32_t(half * half_bytes + row * 128), map, half * 64, from.row,
                 tiles.at.head * maps.head_step, from.outer * maps.outer_step, barrier);
      }
    };
    const auto arrive_filled = [](std::uint32_t barrier) {
      if constexpr (View::is_raw)
        arrive_after_copies(barrier);
      else
        arrive(barrier);  // decoded rows were stored, not copied
    };
#pragma unroll 1
    for (index_t t = 0; t < count; ++t, at.advance()) {
      const int stage = at.stage;
      int lane = threadIdx.x % 32;
      asm volatile("" : "+r"(lane));  // keeps the addresses of a tile's rows from being held in registers
      const index_t slot = tiles.slot_of(t, warp * base::warp_share + lane);
      const bool in_boxes = maps.box_rows > 0 && tiles.is_in_chunks(t);
      // The last stage of keys is freed once more than the others: by the queries.
      wait_phase(stored.keys_freed(stage), at.parity ^ (stage == stages - 1 ? 0 : 1));
      if (in_boxes) {
        copy_boxes(maps.k, t, stored.keys(stage), D, stored.keys_filled(stage));
      } else {
        base::copy_keys(p, tiles.at, slot, warp, lane,
                        [&](int token, int chunk) { return stored.keys(stage) + swizzled(token, chunk); });
        arrive_filled(stored.keys_filled(stage));
      }
      const bool met = own_group < tiles.at.query_rows && tiles.meets(p, t), masked = met && tiles.is_masked(p, t);
      sight& seen = stored.sight_of(stage);
      if (own % group_rows == 0) {
        seen.of_group[own / group_rows] =
            (met ? sight::met : 0) | (masked ? sight::masked : 0) | (in_boxes ? 0 : sight::by_rows);
      }
      if (masked) {
        std::uint32_t bits[base::tile_chunks];
        tiles.seen(p, t, tiles.first_row + own, bits);
#pragma unroll
        for (int c = 0; c < base::tile_chunks; ++c) seen.bits[c][own] = bits[c];
      }
      arrive(stored.keys_filled(stage));
      wait_phase(stored.values_freed(stage), at.parity ^ 1);
      if (in_boxes) {
        copy_boxes(maps.v, t, stored.values(stage), Dv, stored.values_filled(stage));
      } else {
        base::copy_values(p, tiles.at, slot, warp, lane,
                          [&](int token, int chunk) { return stored.values(stage) + swizzled(token, chunk); });
        arrive_filled(stored.values_filled(stage));
      }
    }
  }

  __device__ static void multiply_keys(logits& s, const std::uint32_t (&q)[D / 16][4], std::uint32_t keys) {
    const std::uint64_t first = descriptor(keys);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      multiply_async<T, tile, false>(s[0], q[step], first + (step / 4 * half_bytes + step % 4 * 32) / 16, step > 0);
    }
    commit_products();
  }
  __device__ static void multiply_values(const weights& w, std::uint32_t values, running& state) {
    const std::uint64_t first = descriptor(values, half_bytes);
#pragma unroll
    for (int k = 0; k < tile / 16; ++k) multiply_async<T, Dv, true>(state.out[0], w[0][k], first + k * 16 * 128 / 16);
    commit_products();
  }
  /// Between ordinary reads and writes of shared memory and those of products and the copy engine.
  __device__ static void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  /// Attends the tiles of a piece, by the warps of a group.
  __device__ static void attend(const ring& stored, const std::uint32_t (&q)[D / 16][4],
                                const typename base::logit_scale& scale, bool careful, index_t count, ring_place& at,
                                running& state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    weights w;
    bool pending = false;  // are the weights of the tile before still to be multiplied with its values?
    bool by_rows = false, before_by_rows = false;  // what threads have copied
    const auto wait_values = [&](const ring_place& of, bool copied_by_rows) {
      wait_phase(stored.values_filled(of.stage), of.parity);
      if (copied_by_rows) fence_async();
    };
    ring_place before = at;
    const auto multiply_pending = [&] {
      settle(state.out[0]);
      begin_products();
      multiply_values(w, stored.values(before.stage), state);
      wait_products();
      settle(state.out[0]);
      pending = false;
    };
    const auto hide = [&](logits& s, const sight& seen) {
      base::mask(s, lane, [&](int r, int c) { return seen.bits[c][warp * warp_rows + r * 8 + lane / 4]; });
    };
    // Every lane arrives: racecheck takes one for its warp as no order.
    const auto leave = [&](std::uint32_t barrier) {
      __syncwarp();
      arrive(barrier);
    };
#pragma unroll 1
    for (index_t t = 0; t < count; ++t, at.advance()) {
      wait_phase(stored.keys_filled(at.stage), at.parity);
      const sight& seen = stored.sight_of(at.stage);
      const std::uint32_t of_group = seen.of_group[group];
      by_rows = of_group & sight::by_rows;
      if (by_rows) fence_async();
      if (t > 0) wait_values(before, before_by_rows);
      const bool masked = of_group & sight::masked;
      wait_turn(group);
      if (!(of_group & sight::met)) {
        if (pending) multiply_pending();
        end_turn(group);
        leave(stored.keys_freed(at.stage));
        if (t > 0) leave(stored.values_freed(before.stage));
        before = at, before_by_rows = by_rows;
        continue;
      }
      logits s;
      settle(s[0]);
      typename base::shrinking asked;
      // Exponentials run beside the values' products. While products are under way there is no branch: the compiler would wait
      // for each.
      const auto overlap = [&](auto hidden) {
        settle(state.out[0]);
        begin_products();
        multiply_keys(s, q, stored.keys(at.stage));
        multiply_values(w, stored.values(before.stage), state);
        end_turn(group);
        wait_products<1>();
        settle(s[0]);
        if constexpr (hidden.value) hide(s, seen);
        asked = base::normalise(scale.factor, s, state);
        settle(s[0]);
        __syncwarp();
        arrive_after(stored.keys_freed(at.stage), state.sum[0] + state.sum[1]);
        wait_products();
        settle(state.out[0]);
        leave(stored.values_freed(before.stage));
      };
      if (pending && !scale.first) {
        if (masked)
          overlap(std::true_type{});
        else
          overlap(std::false_type{});
      } else {
        begin_products();
        multiply_keys(s, q, stored.keys(at.stage));
        if (!pending) end_turn(group);
        wait_products();
        settle(s[0]);
        if (pending) {
          multiply_pending();
          end_turn(group);
        }
        scale.apply(s);
        if (masked) hide(s, seen);
        leave(stored.keys_freed(at.stage));
        if (t > 0) leave(stored.values_freed(before.stage));
        asked = base::normalise(scale.factor, s, state);
      }
      base::shrink(asked, state);
      base::pack(s, w);
      pending = true;
      // 0 * NaN is NaN: a token that a row must not see would reach its output.
      if (careful && masked) {
        const std::uint32_t values = stored.values(at.stage);
        wait_values(at, by_rows);
        const auto chunk = [&](int token, int i) {
          return stored.memory + (values - stored.shared) + swizzled(token, i);
        };
        if (!base::all_finite(chunk, lane)) {
          const auto fragment = [&](int k, int pair) {
            return values + swizzled(k * 16 + lane / 8 % 2 * 8 + lane % 8, pair * 2 + lane / 16);
          };
          base::multiply_visible_values(w, fragment, state);
          pending = false;
        }
        fence_async();
      }
      before = at, before_by_rows = by_rows;
    }
    if (count == 0) return;
    wait_values(before, before_by_rows);
    if (pending) multiply_pending();
    __syncwarp();
    arrive(stored.values_freed(before.stage));
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
