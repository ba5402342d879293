// The prefill attention kernel for Hopper: products of four warps at a time (wgmma), which only sm_90a has.
#pragma once

#include "../../device/barrier.cuh"
#include "dense_tiles.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

template <class View>
inline constexpr bool fits_hopper_prefill = (View::k_dim == 64 || View::k_dim == 128) &&
                                            (View::v_dim == 64 || View::v_dim == 128);

/// d [64, 64] += a [64, 16] b [16, 64] by four warps; a in registers, b in shared memory. Transposed: b's rows are its
/// depth. Asynchronous: d and a are in use until wait_products.
template <class T, bool Transposed>
__device__ __forceinline__ void multiply_async(float (*d)[4], const std::uint32_t (&a)[4], std::uint64_t b) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, %37;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)));
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1, %37;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)));
  }
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

/// Products have arrived in `d`: keeps the compiler from moving them before that.
template <int Columns>
__device__ __forceinline__ void settle(float (&d)[Columns][4]) {
#pragma unroll
  for (int i = 0; i < Columns * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

/// Two groups of four warps, 64 query rows each. Queries stay in registers; K and V stream through a ring of three
/// tiles in rows of 128 bytes, their chunks exchanged as the product's descriptors want it. The groups meet at no
/// barrier of the block, so that one's exponentials can run beside the other's products.
/// Lost (TFLOP/s, 16K causal, d 128, bf16, group 4, H200, CUDA 13.0; this gives 460): values' products put off until
/// the next tile's exponentials 372, so with groups taking turns at a named barrier 390, so with queries in shared
/// memory 367 and 394.
template <class View, class Out>
struct prefill_hopper_kernel : prefill_rows<View, Out, 8, 1, 128> {
  using base = prefill_rows<View, Out, 8, 1, 128>;
  using base::block_rows, base::D, base::Dv, base::threads, base::tile, base::warp_rows, base::warps;
  using typename base::logits, typename base::place, typename base::problem_type, typename base::running;
  using typename base::T, typename base::weights;
  static constexpr int resident = 1, stages = 3, group_rows = 64, half_bytes = tile * 128;  // of 64 elements a token
  static constexpr int k_bytes = D / 64 * half_bytes, v_bytes = Dv / 64 * half_bytes, stage_bytes = k_bytes + v_bytes;
  // The queries pass through the ring's last stage before it is first filled.
  static constexpr int shared_bytes = stages * stage_bytes + 2 * stages * 8;
  static_assert(block_rows == tile, "tessera: queries are laid out as a tile of keys");

  /// Where 16-byte chunk `chunk` of row `row` lies in a tensor of rows.
  __device__ static std::uint32_t swizzled(int row, int chunk) {
    return std::uint32_t(chunk / 8 * half_bytes + row * 128 + ((chunk ^ row) & 7) * 16);
  }
  /// Descriptor of an operand at `address`: groups of eight 128-byte rows, 1024 bytes apart, 128-byte swizzle.
  __device__ static std::uint64_t descriptor(std::uint32_t address) {
    return std::uint64_t(address >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
  }

  template <class Tiles>
  __device__ static void stage(const problem_type& p, const Tiles& tiles, index_t t, std::uint32_t to, int warp,
                               int lane) {
    tiles.copy(
        p, t, warp, lane, [&](int token, int chunk) { return to + swizzled(token, chunk); },
        [&](int token, int chunk) { return to + k_bytes + swizzled(token, chunk); });
  }

  template <class Tiles>
  __device__ static void run(const problem_type& p, const prefill_parts& parts,
                             const typename Tiles::argument& argument) {
    extern __shared__ __align__(1024) unsigned char wide_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tiles tiles(p, parts, argument, wide_memory + shared_bytes);
    const place at = tiles.at;
    const index_t warp_row = tiles.first_row + warp * warp_rows, group_row = tiles.first_row + warp / 4 * group_rows;
    const std::uint32_t shared = shared_address(wide_memory);
    // Tiles are numbered through all pieces: `done` of them lie behind.
    index_t done = 0;
    const auto ring = [&](index_t t) { return shared + std::uint32_t((done + t) % stages * stage_bytes); };
    const auto filled = [&](index_t t) {
      return shared + std::uint32_t(stages * stage_bytes + (done + t) % stages * 8);
    };
    const auto freed = [&](index_t t) { return filled(t) + stages * 8; };
    const auto phase = [&](index_t t) { return std::uint32_t((done + t) / stages & 1); };
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) init_barrier(filled(i), threads), init_barrier(freed(i), threads);
    }
    const std::uint32_t queries = shared + (stages - 1) * stage_bytes;
    base::copy_queries(p, at, warp_row, lane,
                       [&](int r, int chunk) { return queries + swizzled(warp * warp_rows + r, chunk); });
    commit_copies();
    index_t count = tiles.gather(p);
    __syncthreads();  // the barriers are there
    const auto fetch = [&](index_t t) {
      stage(p, tiles, t, ring(t), warp, lane);
      if constexpr (View::is_raw)
        arrive_after_copies(filled(t));
      else
        arrive(filled(t));  // decoded rows were stored, not copied
    };
    for (index_t t = 0; t < min(count, stages - 1); ++t) fetch(t);
    wait_copies<0>();
    __syncwarp();
    std::uint32_t q[D / 16][4];
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      load_matrices(q[step], queries + swizzled(warp * warp_rows + lane % 16, step * 2 + lane / 16));
    }
    __syncthreads();  // all have their queries: the last stage is free
    tiles.ask(p, group_row, group_rows);
    const typename base::logit_scale scale(p.rule);
    const bool idle = group_row >= at.query_rows;
    running state;
    base::clear(state);
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (index_t t = 0; t < count; ++t) {
        wait_phase(filled(t), phase(t));
        asm volatile("fence.proxy.async.shared::cta;" ::
                         : "memory");  // copies were ordinary writes, products read as async
        const std::uint32_t keys = ring(t), values = keys + k_bytes;
        // The next tile but one goes where the one before this lay, once both groups have left that. The first tile of a
        // piece has none before it: all have left the piece before.
        const auto fetch_next = [&] {
          if (t + stages - 1 >= count) return;
          if (t > 0) wait_phase(freed(t - 1), phase(t - 1));
          fetch(t + stages - 1);
        };
        if (!idle && tiles.meets(p, t)) {
          logits s = {};
          settle(s[0]);
          begin_products();
#pragma unroll
          for (int part = 0; part < tile / 64; ++part) {
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
              multiply_async<T, false>(
                  s[0] + part * 8, q[step],
                  descriptor(keys + std::uint32_t(step / 4 * half_bytes + part * 64 * 128 + step % 4 * 32)));
            }
          }
          commit_products();
          wait_products();
          settle(s[0]);
          scale.apply(s);
          const bool masked = tiles.is_masked(p, t);
          if (masked) tiles.mask(p, warp_row, t, lane, s);
          weights w;
          base::normalise(scale.factor, s, w, state);
          // 0 * NaN is NaN: a token that a row must not see would reach its output.
          const auto chunk = [&](int token, int i) { return wide_memory + (values - shared) + swizzled(token, i); };
          if (masked && !base::all_finite(chunk, lane)) {
            const auto fragment = [&](int k, int pair) {
              return values + swizzled(k * 16 + lane / 8 % 2 * 8 + lane % 8, pair * 2 + lane / 16);
            };
            base::multiply_visible_values(w, fragment, state);
            fetch_next();
          } else {
            settle(state.out[0]);
            begin_products();
#pragma unroll
            for (int k = 0; k < tile / 16; ++k) {
#pragma unroll
              for (int part = 0; part < Dv / 64; ++part) {
                multiply_async<T, true>(state.out[0] + part * 8, w[0][k],
                                        descriptor(values + std::uint32_t(part * half_bytes + k * 16 * 128)));
              }
            }
            commit_products();
            fetch_next();
            wait_products();
            settle(state.out[0]);
          }
        } else {
          fetch_next();
        }
        __syncwarp();
        arrive(freed(t));  // every lane: racecheck takes one for its warp as no order
      }
      if constexpr (Tiles::one_piece) break;
      if (!tiles.has_more()) break;
      __syncthreads();  // all have left the piece, its list and its tiles
      done += count;
      count = tiles.gather(p);
      for (index_t t = 0; t < min(count, stages - 1); ++t) fetch(t);
    }
    if (!idle) base::finish(p, parts, at, warp_row, lane, state);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
