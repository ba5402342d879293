// The prefill attention kernel for Hopper: products of four warps at a time (wgmma), which only sm_90a has.
#pragma once

#include <type_traits>

#include "../../detail/wide_products.cuh"
#include "dense_tiles.cuh"
#include "prefill_fetch.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

namespace detail {

template <class View>
inline constexpr bool fits_hopper_prefill =
    (View::k_dim == 64 || View::k_dim == 128) && (View::v_dim == 64 || View::v_dim == 128);

/// Two groups of four warps compute, 64 query rows each, and four warps fetch, by boxes of the copy engine where they
/// can. Queries stay in registers. K and V stream through a ring of three tiles in rows of 128 bytes, whose chunks are
/// swizzled as the product's descriptors require. A tile's values are multiplied after the next tile's keys and while
/// that tile's exponentials are computed. The groups take turns at the products. A block attends item after item: the
/// queries and tiles of an item are fetched while the previous item is computed.
/// Slower (TFLOP/s, 16K causal, d 128, bf16, group 4, H200, CUDA 13.0; this gave 520 then, and gives 587 now):
/// exponentials after both products, which were 64 columns wide, 500; the same without turns 483; the same with rows
/// copied one by one 432; without fetching warps and without either of these 470.
template <class View, class Out>
struct prefill_hopper_kernel : prefill_fetch<View, Out> {
  using fetching = prefill_fetch<View, Out>;
  using shape = prefill_hopper_shape<View, Out>;
  using base = typename shape::base;
  using base::block_rows, base::D, base::Dv, base::tile, base::warp_rows;
  using shape::computers, shape::half_bytes, shape::swizzled, shape::threads;
  using typename base::logits, typename base::item_rows, typename base::problem_type, typename base::running;
  using typename base::T, typename base::weights;
  using typename fetching::ring, typename fetching::ring_place;
  using typename shape::meeting, typename shape::sight;
  static constexpr int shared_bytes = ring::bytes;

  template <class Tiles>
  __device__ static void run(const problem_type& p, const prefill_parts& parts, const row_maps& maps,
                             const typename Tiles::argument& argument) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    const ring stored(wide_memory);
    if (threadIdx.x == 0) stored.begin();
    __syncthreads();  // the barriers are initialised
    if (int(threadIdx.x) >= computers) {
      give_registers<shape::copier_registers>();
      fetching::template fetch_items<Tiles>(p, parts, maps, argument, stored, wide_memory + shared_bytes);
    } else {
      take_registers<shape::computer_registers>();
      attend_items(p, parts, stored);
    }
  }

 private:
  /// Descriptor of an operand at `address`: groups of eight 128-byte rows, 1024 bytes apart, 128-byte swizzle. For
  /// values, the second 64 elements of a row lie `half_bytes` after the first. Adding n advances by 16 n bytes.
  /// Only the lower half differs. The code states that all lanes have the same value, so the assembler adds directly in
  /// the registers that a product reads, which saves a few instructions per product.
  __device__ static std::uint32_t descriptor(std::uint32_t address, int apart = 16) {
    return __shfl_sync(~0u, address / 16 | std::uint32_t(apart / 16) << 16, 0);
  }
  __device__ static std::uint64_t descriptor_from(std::uint32_t lower) {
    return std::uint64_t(lower) | 64ull << 32 | 1ull << 62;
  }
  __device__ static std::uint32_t keys_from(const ring& stored, int stage) { return descriptor(stored.keys(stage)); }
  __device__ static std::uint32_t values_from(const ring& stored, int stage) {
    return descriptor(stored.values(stage), half_bytes);
  }
  __device__ static void multiply_keys(logits& s, const std::uint32_t (&q)[D / 16][4], std::uint32_t first) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const std::uint64_t from = descriptor_from(first + (step / 4 * half_bytes + step % 4 * 32) / 16);
      multiply_async<T, tile, false>(s[0], q[step], from, step > 0);
    }
    commit_products();
  }
  __device__ static void multiply_values(const weights& w, std::uint32_t first, running& state) {
#pragma unroll
    for (int k = 0; k < tile / 16; ++k) {
      multiply_async<T, Dv, true>(state.out[0], w[0][k], descriptor_from(first + k * 16 * 128 / 16));
    }
    commit_products();
  }
  /// Arrives once a sum of weights is complete. It does not wait for later work, for which the assembler would
  /// otherwise wait.
  __device__ static void arrive_after(std::uint32_t barrier, float sum) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.geu.f32 there, %1, 0f00000000;\n"
        "@there mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier),
        "f"(sum)
        : "memory");
  }
  /// Every lane arrives: racecheck does not count the arrival of one lane as ordering its whole warp.
  __device__ static void leave(std::uint32_t barrier) {
    __syncwarp();
    arrive(barrier);
  }
  /// A barrier for each group's turn at the products.
  __device__ static void wait_turn(int group) { wait_at(1 + group, computers); }
  __device__ static void end_turn(int group) { arrive_at(2 - group, computers); }

  /// Orders ordinary reads and writes of shared memory against those of products and the copy engine.
  __device__ static void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  /// Attends the fetched tiles, by the computing warps. If a value that a row must not see was not finite, it reached
  /// the output: such an item is attended again. Values are examined only then, because this takes as long as the
  /// products.
  __device__ static void attend_items(const problem_type& p, const prefill_parts& parts, const ring& stored) {
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, group = warp / 4;
    const typename base::logit_scale scale(p.rule);
    auto& notes = stored.noted();
    ring_place at;
    int number = 0;
    std::uint32_t again = 0;      // items that are attended again
    if (group == 1) end_turn(1);  // the first group begins
#pragma unroll 1
    while (true) {
      const bool careful = again != 0;
      std::uint32_t told;
#pragma unroll 1
      while (true) {
        wait_phase(stored.keys_filled(at.stage), at.parity);
        told = stored.sight_of(at.stage).of_group[group];
        if (told & sight::end) break;
        std::uint32_t q[D / 16][4];
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
          load_matrices(q[step], stored.keys(at.stage) + swizzled(warp * warp_rows + lane % 16, step * 2 + lane / 16));
        }
        fence_async();  // boxes of keys are written there next
        leave(stored.keys_freed(at.stage));
        running state;
        base::clear(state);
        attend(stored, q, scale, careful, at, state);
        const int place = careful ? __ffs(int(again)) - 1 : number++ % ring::works;
        again &= again - 1;
        if (!careful) {
          bool spoilt = false;
#pragma unroll
          for (int i = 0; i < Dv / 2; ++i) spoilt = spoilt || state.out[0][i / 4][i % 4] != state.out[0][i / 4][i % 4];
          if (__any_sync(~0u, spoilt) && lane == 0) atomicOr(&notes.spoilt, 1u << place);
        }
        const typename ring::work& work = notes.items[place];
        base::finish(p, parts, work.source, work.first_row + warp * warp_rows, lane, state);
      }
      leave(stored.keys_freed(at.stage));
      wait_phase(stored.values_filled(at.stage), at.parity);
      leave(stored.values_freed(at.stage));
      at.advance();
      meeting::wait();
      again = careful ? 0 : notes.spoilt;
      if (again == 0 && told & sight::last) return;
    }
  }

  /// Attends the tiles that follow an item's queries at `at`, and then sets `at` to the next item's queries.
  __device__ static void attend(const ring& stored, const std::uint32_t (&q)[D / 16][4],
                                const typename base::logit_scale& scale, bool careful, ring_place& at, running& state) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
    weights w;
    bool pending = false;  // whether the previous tile's weights are still to be multiplied with its values
    bool by_rows = false, before_by_rows = false;  // whether threads copied this tile, and the previous one
    const auto wait_values = [&](const ring_place& of, bool copied_by_rows) {
      wait_phase(stored.values_filled(of.stage), of.parity);
      if (copied_by_rows) fence_async();
    };
    ring_place before = at;  // the previous place: at first that of the queries, which have no values
    const auto multiply_pending = [&](std::uint32_t values) {
      settle(state.out[0]);
      begin_products();
      multiply_values(w, values, state);
      wait_products();
      settle(state.out[0]);
      pending = false;
    };
    const auto hide = [&](logits& s, const sight& seen) {
      base::mask(s, lane, [&](int r, int c) { return seen.bits[c][warp * warp_rows + r * 8 + lane / 4]; });
    };
#pragma unroll 1
    for (at.advance();; at.advance()) {
      wait_phase(stored.keys_filled(at.stage), at.parity);
      const sight& seen = stored.sight_of(at.stage);
      const std::uint32_t of_group = seen.of_group[group];
      if (of_group & (sight::queries | sight::end)) break;
      by_rows = of_group & sight::by_rows;
      if (by_rows) fence_async();
      wait_values(before, before_by_rows);
      const bool masked = of_group & sight::masked;
      // Computed before the turn begins, so that products can start at once.
      const std::uint32_t keys = keys_from(stored, at.stage), values = values_from(stored, before.stage);
      int way = !(of_group & sight::met) ? 0 : !pending || scale.first ? 1 : masked ? 2 : 3;
      asm volatile("" : "+r"(way));
      wait_turn(group);
      if (way == 0) {
        if (pending) multiply_pending(values);
        end_turn(group);
        leave(stored.keys_freed(at.stage));
        leave(stored.values_freed(before.stage));
        before = at, before_by_rows = by_rows;
        continue;
      }
      logits s;
      settle(s[0]);
      typename base::shrinking asked;
      // Exponentials run beside the values' products. There is no branch while products are running: the compiler would
      // wait for them at each branch.
      const auto overlap = [&](auto hidden) {
        settle(state.out[0]);
        begin_products();
        multiply_keys(s, q, keys);
        multiply_values(w, values, state);
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
      if (way == 3) {
        overlap(std::false_type{});
      } else if (way == 2) {
        overlap(std::true_type{});
      } else {
        begin_products();
        multiply_keys(s, q, keys);
        if (!pending) end_turn(group);
        wait_products();
        settle(s[0]);
        if (pending) {
          multiply_pending(values);
          end_turn(group);
        }
        scale.apply(s);
        if (masked) hide(s, seen);
        leave(stored.keys_freed(at.stage));
        leave(stored.values_freed(before.stage));
        asked = base::normalise(scale.factor, s, state);
      }
      base::shrink(asked, state);
      base::pack(s, w);
      pending = true;
      // 0 * NaN is NaN: a token that a row must not see would reach its output.
      if (careful && masked) {
        const std::uint32_t own = stored.values(at.stage);
        wait_values(at, by_rows);
        const auto chunk = [&](int token, int i) { return stored.memory + (own - stored.shared) + swizzled(token, i); };
        if (!base::all_finite(chunk, lane)) {
          const auto fragment = [&](int k, int pair) {
            return own + swizzled(k * 16 + lane / 8 % 2 * 8 + lane % 8, pair * 2 + lane / 16);
          };
          base::multiply_visible_values(w, fragment, state);
          pending = false;
        }
        fence_async();
      }
      before = at, before_by_rows = by_rows;
    }
    wait_values(before, before_by_rows);
    if (pending) multiply_pending(values_from(stored, before.stage));
    leave(stored.values_freed(before.stage));
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
