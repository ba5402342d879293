// Which tokens a block of the decode kernel reads: all rows' tiles, laid end to end and cut into even pieces.
#pragma once

#include "../../../../core/config.hpp"
#include "../../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int most_rows = 1024;    // (sequence, kv_head) rows whose tile counts fit the block's scan
inline constexpr int most_blocks = 1024;  // so that products of two piece numbers stay below 2^20

/// Scratch: a counter per (query block, row), then partial outputs and softmax states by slot = piece + row.
struct decode_scratch {
  unsigned* arrived;  // [query blocks, most rows]: parts of a row that are written
  float* out;         // [query blocks, most pieces + most rows, 16, v_dim]
  float2* state;      // [query blocks, most pieces + most rows, 16] maximum (base 2) and sum
  index_t most_rows;  // of the operation; a problem may have fewer
  index_t slots;      // most pieces + most rows
};

/// floor(a / b) for 0 <= a < 2^20 and b > 0, without the division's twenty instructions: with half added, the quotient
/// is at least 1 / (2b) away from a whole number, and the product is off by less.
__device__ inline index_t small_quotient(index_t a, index_t b) {
  return index_t((float(a) + 0.5f) * __fdividef(1.0f, float(b)));
}

/// `tiles` tiles cut into `count` pieces, one a block: piece i begins at tile floor(i * tiles / count). So pieces end
/// where rows do when rows are equal and divide `count`; a block that straddles two rows pays for a merge more.
struct even_cut {
  index_t tiles, count, size, rest;

  __device__ even_cut(index_t tiles_, index_t most, index_t rows, bool equal)
      : tiles(tiles_), count(min(most, max(tiles_, 1))) {
    // Short pieces of equal rows: as many as rows divide, if that idles few blocks, so that they need fewer merges. Long
    // pieces want every multiprocessor (B8 128K: 944 us on 132, 967 us on 128; H200, CUDA 13.0).
    const index_t spare = equal && rows <= count ? count - small_quotient(count, rows) * rows : count;
    if (spare * 16 <= count && tiles < count * 128) count -= spare;
    // A merge through global memory takes longer than a second tile, or than a third and a fourth where most
    // multiprocessors have a row (64 rows of 512 tokens: 10.0 us in halves, 9.0 whole; 8 rows: 6.4 us in quarters, 8.0
    // whole; 8 rows of 256: 6.3 in halves, 5.7 whole; H200, CUDA 13.0).
    if (rows < count && (tiles <= rows * 2 || (tiles <= rows * 4 && rows * 3 > count))) count = rows;
    size = index_t(unsigned(tiles) / unsigned(count));
    rest = tiles - size * count;
  }
  __device__ index_t begin(index_t piece) const { return piece * size + small_quotient(piece * rest, count); }
  __device__ index_t piece_of(index_t tile) const {
    index_t piece = min(count - 1, index_t(float(tile) * __fdividef(float(count), float(tiles))));
    while (begin(piece) > tile) --piece;
    while (begin(piece + 1) <= tile) ++piece;
    return piece;
  }
};

/// Inclusive sum over the lanes of a warp.
__device__ inline index_t scan_warp(index_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const index_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

/// Inclusive prefix sums of `tiles_of(row)` into `ends`, by all threads of the block. Every block does it for itself:
/// lengths change from step to step and the host does not know them.
template <int Threads, class TilesOf>
__device__ void scan_rows(index_t rows, index_t* ends, index_t* warp_totals, const TilesOf& tiles_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const index_t each = (rows + Threads - 1) / Threads, first = min(index_t(threadIdx.x) * each, rows);
  const index_t last = min(first + each, rows);
  index_t sum = 0;
#pragma unroll 4
  for (index_t row = first; row < last; ++row) sum += tiles_of(row);
  const index_t inclusive = scan_warp(sum);
  if (lane == 31) warp_totals[warp] = inclusive;
  __syncthreads();
  index_t end = inclusive - sum;
  for (int w = 0; w < warp; ++w) end += warp_totals[w];
#pragma unroll 4
  for (index_t row = first; row < last; ++row) ends[row] = end += tiles_of(row);
  __syncthreads();
}

/// The row that holds `tile`, found by a warp: the number of rows that end at or before it.
__device__ inline index_t find_row(const index_t* ends, index_t rows, index_t tile) {
  const index_t lane = threadIdx.x % 32, each = (rows + 31) / 32;
  const bool group_before = (lane + 1) * each <= rows && ends[(lane + 1) * each - 1] <= tile;
  const index_t first = index_t(__popc(__ballot_sync(~0u, group_before))) * each;
  const bool before = lane < each && first + lane < rows && ends[first + lane] <= tile;
  return first + index_t(__popc(__ballot_sync(~0u, before)));
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
