// The prefill attention kernel for any device: 16x8x16 products of whole warps, two blocks to a multiprocessor.
#pragma once

#include "prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Rows of K, V and Q lie in shared memory, padded to an odd number of 16-byte chunks, so that matrix loads do not
/// collide. A loaded fragment of K or V serves two row tiles: with one, shared memory is the limit. Beyond v_dim 128
/// two do not fit the registers.
/// Lost (TFLOP/s, 16K causal, d 128, bf16, group 4, H200, CUDA 13.0; this gives 340): one block of eight warps instead
/// of two of four 301, queries in registers with tiles of 32 tokens 294.
template <class View, class Out>
inline constexpr int prefill_warps = View::k_dim <= 128 && View::v_dim <= 128 ? 4 : 8;
template <class View, class Out>
using prefill_rows_of = prefill_rows<View, Out, prefill_warps<View, Out>, (View::v_dim <= 128 ? 2 : 1), 64>;

template <class View, class Out>
struct prefill_kernel : prefill_rows_of<View, Out> {
  using base = prefill_rows_of<View, Out>;
  using base::block_rows, base::D, base::Dv, base::row_tiles, base::tile, base::warp_rows, base::warps;
  using typename base::logits, typename base::place, typename base::problem_type, typename base::running;
  using typename base::slot_range, typename base::T, typename base::weights;
  static constexpr int resident = warps == 4 ? 2 : 1;  // blocks of a multiprocessor
  static constexpr int k_row = ((D / 8) | 1) * 16, v_row = ((Dv / 8) | 1) * 16;
  static constexpr int stage_bytes = tile * (k_row + v_row), q_bytes = block_rows * k_row;
  static constexpr int shared_bytes = q_bytes + 2 * stage_bytes;

  __device__ static void stage(const problem_type& p, const place& at, index_t first, std::uint32_t to, int warp,
                               int lane) {
    base::copy_tile(
        p, at, first, warp, lane, [&](int token, int chunk) { return to + std::uint32_t(token * k_row + chunk * 16); },
        [&](int token, int chunk) { return to + std::uint32_t(tile * k_row + token * v_row + chunk * 16); });
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

  __device__ static void run(const problem_type& p, const prefill_parts& parts) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto [at, first_row, first_tile, last_tile] = base::work::mine(p, parts);
    const index_t warp_row = first_row + warp * warp_rows;
    const std::uint32_t shared = shared_address(memory), queries = shared + std::uint32_t(warp * warp_rows * k_row);
    const auto ring = [&](index_t t) { return shared + std::uint32_t(q_bytes + t % 2 * stage_bytes); };
    if (first_tile < last_tile) stage(p, at, first_tile * tile, ring(first_tile), warp, lane);
    base::copy_queries(p, at, warp_row, lane,
                       [&](int r, int chunk) { return queries + std::uint32_t(r * k_row + chunk * 16); });
    commit_copies();
    const index_t oldest = base::position_of(p, at, warp_row);
    const index_t newest = base::position_of(p, at, warp_row + warp_rows - 1);
    const slot_range by_any = base::seen(p, at, oldest, newest), by_all = base::seen(p, at, newest, oldest);
    const typename base::logit_scale scale(p.rule);
    const bool idle = warp_row >= at.query_rows;
    running state;
    base::clear(state);
#pragma unroll 1
    for (index_t t = first_tile; t < last_tile; ++t) {
      const index_t first = t * tile;
      wait_copies<0>();
      __syncthreads();  // the tile is there, and all warps have left the one before
      if (t + 1 < last_tile) stage(p, at, first + tile, ring(t + 1), warp, lane);
      commit_copies();
      if (idle || !by_any.meets(first, first + tile)) continue;
      const std::uint32_t keys = ring(t), values = keys + tile * k_row;
      logits s = {};
      multiply_keys(queries, keys, lane, s);
      scale.apply(s);
      const bool masked = !by_all.covers(first, first + tile);
      if (masked) base::mask(p, at, warp_row, first, lane, s);
      weights w;
      base::normalise(scale.factor, s, w, state);
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
    wait_copies<0>();
    if (!idle) base::finish(p, parts, at, warp_row, lane, state);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
