// Which tokens a block of the decode kernel reads: all rows' tiles, laid end to end and cut into even pieces.
#pragma once

#include "../../device/even_cut.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int most_rows = 1024;  // (sequence, kv_head) rows whose tile counts fit the block's scan
inline constexpr int most_blocks = most_pieces;

/// What a block reads by a split that was made ahead.
struct alignas(16) split_piece {
  index_t row, part, parts, kind;
  /// `cut_each_step` is what a workspace begins with.
  static constexpr index_t cut_each_step = 0, part_of_row = 1, nothing = 2;
};

/// The pieces that hold a row, one a block.
struct row_parts {
  index_t first_piece, count;
};

/// Scratch: a counter per (query block, row), then partial outputs and softmax states by slot = piece + row.
struct decode_scratch {
  const split_piece* split;  // [pieces]; read only where splits are made ahead
  unsigned* arrived;         // [query blocks, most rows]: parts of a row that are written
  float* out;                // [query blocks, slots, 16, v_dim]
  float2* state;             // [query blocks, slots, 16] maximum (base 2) and sum
  index_t most_rows;         // of the operation; a problem may have fewer
  index_t slots;             // most pieces + most rows
};

/// How many pieces, one a block, `tiles` tiles of so many rows are cut into. Pieces end where rows do when rows are
/// equal and divide them; a block that straddles two rows pays for a merge more.
__device__ inline index_t decode_pieces(index_t tiles, index_t most, index_t rows, bool equal) {
  const index_t count = (min)(most, (max)(tiles, 1));
  // Short pieces of equal rows: as many as rows divide, if that idles few blocks, so that they need fewer merges. Long
  // pieces want every multiprocessor (B8 128K: 944 us on 132, 967 us on 128; H200, CUDA 13.0).
  const index_t spare = equal && rows <= count ? count - small_quotient(count, rows) * rows : count;
  const index_t even = spare * 16 <= count && tiles < count * 128 ? count - spare : count;
  // A merge through global memory takes longer than a second tile, or than a third and a fourth where most
  // multiprocessors have a row (64 rows of 512 tokens: 10.0 us in halves, 9.0 whole; 8 rows: 6.4 us in quarters, 8.0
  // whole; 8 rows of 256: 6.3 in halves, 5.7 whole; H200, CUDA 13.0).
  return rows < even && (tiles <= rows * 2 || (tiles <= rows * 4 && rows * 3 > even)) ? rows : even;
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
