// The prefill attention kernel for any device: 16x8x16 products of whole warps.
#pragma once

#include "../../../device/tuning.cuh"
#include "dense_tiles.cuh"
#include "tensor_map.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// How rows lie in shared memory: padded to an odd number of 16-byte chunks, so that matrix loads have no bank
/// conflicts.
template <class View>
struct prefill_memory {
  static constexpr int k_row = ((View::k_dim / 8) | 1) * 16, v_row = ((View::v_dim / 8) | 1) * 16;
  /// Of a block's query rows and two tiles of `tile` tokens.
  static constexpr int bytes(int rows, int tile) { return rows * k_row + 2 * tile * (k_row + v_row); }
};

/// A loaded fragment of K or V serves two row tiles: with one, shared memory is the limit. Beyond v_dim 128, two row
/// tiles do not fit the registers.
/// Slower (TFLOP/s, 16K causal, d 128, bf16, group 4, H200, CUDA 13.0; this gives 340): one block of eight warps
/// instead of two of four 301; queries in registers with tiles of 32 tokens 294.
template <class View, class Out, int Warps = (View::k_dim <= 128 && View::v_dim <= 128 ? 4 : 8),
          int RowTiles = (View::v_dim <= 128 ? 2 : 1), int Tile = 64>
struct prefill_kernel : prefill_rows<View, Out, Warps, RowTiles, Tile> {
  using base = prefill_rows<View, Out, Warps, RowTiles, Tile>;
  using base::block_rows, base::D, base::Dv, base::row_tiles, base::tile, base::warp_rows, base::warps;
  using typename base::logits, typename base::item_rows, typename base::problem_type, typename base::running;
  using typename base::T, typename base::weights;
  static constexpr int resident = warps == 4 ? 2 : 1;  // blocks per multiprocessor
  using listing = whole_block;
  static constexpr int listers = base::threads;
  static constexpr int k_row = prefill_memory<View>::k_row, v_row = prefill_memory<View>::v_row;
  static constexpr int stage_bytes = tile * (k_row + v_row), q_bytes = block_rows * k_row;
  static constexpr int shared_bytes = prefill_memory<View>::bytes(block_rows, tile);
  static_assert(shared_bytes == q_bytes + 2 * stage_bytes, "tessera: a block has its query rows and two tiles");

  template <class Tiles>
  __device__ static void stage(const problem_type& p, const Tiles& tiles, index_t t, std::uint32_t to, int warp,
                               int lane) {
    const index_t slot = tiles.slot_of(t, warp * base::warp_share + lane % base::warp_share);
    base::copy_keys(p, tiles.source, slot, warp, lane,
                    [&](int token, int chunk) { return to + std::uint32_t(token * k_row + chunk * 16); });
    base::copy_values(p, tiles.source, slot, warp, lane, [&](int token, int chunk) {
      return to + std::uint32_t(tile * k_row + token * v_row + chunk * 16);
    });
  }

  __device__ static void multiply_keys(std::uint32_t queries, std::uint32_t keys, int lane, logits& s) {
    const int matrix = lane / 8, in_matrix = lane % 8;
    const std::uint32_t q_at = queries + std::uint32_t(lane % 16 * k_row + lane / 16 * 16);
    const std::uint32_t k_at = keys + std::uint32_t((matrix / 2 * 8 + in_matrix) * k_row + matrix % 2 * 16);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t a[row_tiles][4];
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) load_matrices(a[m], q_at + std::uint32_t(m * 16 * k_row + step * 32));
#pragma unroll
      for (int pair = 0; pair < tile / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices(b, k_at + std::uint32_t(pair * 16 * k_row + step * 32));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          multiply<T>(s[m][pair * 2], a[m], b[0], b[1]);
          multiply<T>(s[m][pair * 2 + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// Lane's address of a transposed fragment: tokens run along the matrix rows.
  __device__ static std::uint32_t value_address(std::uint32_t values, int lane) {
    return values + std::uint32_t((lane / 8 % 2 * 8 + lane % 8) * v_row + lane / 16 * 16);
  }

  __device__ static void multiply_values(const weights& w, std::uint32_t values, int lane, running& state) {
    const std::uint32_t v_at = value_address(values, lane);
#pragma unroll
    for (int k = 0; k < tile / 16; ++k) {
#pragma unroll
      for (int pair = 0; pair < Dv / 16; ++pair) {
        std::uint32_t b[4];
        load_matrices_transposed(b, v_at + std::uint32_t(k * 16 * v_row + pair * 32));
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          multiply<T>(state.out[m][pair * 2], w[m][k], b[0], b[1]);
          multiply<T>(state.out[m][pair * 2 + 1], w[m][k], b[2], b[3]);
        }
      }
    }
  }

  template <class Tiles>
  __device__ static void run(const problem_type& p, const prefill_parts& parts, const row_maps&,
                             const typename Tiles::argument& argument) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Tiles tiles(p, parts, index_t(blockIdx.x), argument, memory + shared_bytes);
    const item_rows at = tiles.source;
    const index_t warp_row = tiles.first_row + warp * warp_rows;
    const std::uint32_t shared = shared_address(memory), queries = shared + std::uint32_t(warp * warp_rows * k_row);
    const auto ring = [&](index_t t) { return shared + std::uint32_t(q_bytes + t % 2 * stage_bytes); };
    index_t count = tiles.gather(p);
    if (count > 0) stage(p, tiles, 0, ring(0), warp, lane);
    base::template copy_queries<warp_rows>(
        p, at, warp_row, lane, [&](int r, int chunk) { return queries + std::uint32_t(r * k_row + chunk * 16); });
    commit_copies();
    tiles.ask(p, warp_row, warp_rows);
    const typename base::logit_scale scale(p.rule);
    const bool idle = warp_row >= at.query_rows;
    running state;
    base::clear(state);
#pragma unroll 1
    while (true) {
#pragma unroll 1
      for (index_t t = 0; t < count; ++t) {
        wait_copies<0>();
        __syncthreads();  // the tile has arrived, and all warps have finished the previous one
        if (t + 1 < count) stage(p, tiles, t + 1, ring(t + 1), warp, lane);
        commit_copies();
        if (idle || !tiles.meets(p, t)) continue;
        const std::uint32_t keys = ring(t), values = keys + tile * k_row;
        logits s = {};
        multiply_keys(queries, keys, lane, s);
        scale.apply(s);
        const bool masked = tiles.is_masked(p, t);
        if (masked) {
          base::mask(s, lane, [&](int r, int c) { return tiles.visible_bits(p, t, c, warp_row + r * 8 + lane / 4); });
        }
        weights w;
        base::shrink(base::normalise(scale.factor, s, state), state);
        base::pack(s, w);
        // 0 * NaN is NaN: a token that a row must not see would reach its output.
        const auto chunk = [&](int token, int i) { return memory + (values - shared) + token * v_row + i * 16; };
        if (masked && !base::all_finite(chunk, lane)) {
          const std::uint32_t v_at = value_address(values, lane);
          base::multiply_visible_values(
              w, [&](int k, int pair) { return v_at + std::uint32_t(k * 16 * v_row + pair * 32); }, state);
        } else {
          multiply_values(w, values, lane, state);
        }
      }
      if constexpr (Tiles::one_piece) break;
      if (!tiles.has_more()) break;
      __syncthreads();  // all warps have finished with the piece, its list and both tiles
      count = tiles.gather(p);
      if (count > 0) stage(p, tiles, 0, ring(0), warp, lane);
      commit_copies();
    }
    wait_copies<0>();
    if (!idle) base::finish(p, parts, at, warp_row, lane, state);
  }
};

inline constexpr int small_prefill_tile = 32;
/// Warps of the largest block that every device has shared memory for, and for `more` bytes beside it. Each warp has
/// one row tile, so that there are more warps where one block fills a multiprocessor. It has not been timed on such a
/// device.
template <class View>
constexpr int small_prefill_warps(int more) {
  int warps = 8;
  while (warps > 2 && prefill_memory<View>::bytes(warps * 16, small_prefill_tile) + more > least_shared_memory) {
    warps /= 2;
  }
  return warps;
}
template <class View, class Out, int Warps>
using small_prefill_kernel = prefill_kernel<View, Out, Warps, 1, small_prefill_tile>;

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
