// The tiles of dense prefill attention: neighbouring slots, masked by the rule alone.
#pragma once

#include "prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// What a block of a prefill kernel goes through, and what its rows see of it. A kernel takes any type with
///   argument, memory_bytes                 what a launch says beside the problem; shared memory of a block
///   one_piece                              whether `gather` is called once
///   (p, parts, argument, memory)           a block's: `at` and `first_row` are its query rows
///   gather(p)                              block-wide, no barrier in front: the tiles of the next piece, and how many they are;
///                                          `has_more` says whether another piece follows
///   ask(p, first_row, rows)                which of the block's rows the following are about
///   copy(p, t, warp, lane, to_key, to_value)   a warp's share of tile t of the piece
///   meets(p, t), is_masked(p, t)           whether any row sees anything of it; whether `mask` is needed
///   mask(p, first_row, t, lane, logits)    hides what the rows of a warp, from `first_row` on, do not see
template <class Rows>
struct dense_tiles {
  using problem_type = typename Rows::problem_type;
  using place = typename Rows::place;
  using logits = typename Rows::logits;
  static constexpr int tile = Rows::tile, row_tiles = Rows::row_tiles, memory_bytes = 0;
  static constexpr bool one_piece = true;
  struct argument {};

  place at;
  index_t first_row, first_tile, count;
  typename Rows::slot_range by_any, by_all;

  /// Part `part` of the range that query rows [first_row, first_row + block_rows) see.
  __device__ dense_tiles(const problem_type& p, const prefill_parts& parts, const argument&, unsigned char*) {
    const index_t heads = p.view.sequences * p.view.kv_heads, group = p.q.heads / p.view.kv_heads;
    const index_t item = index_t(blockIdx.x) / parts.splits, part = index_t(blockIdx.x) % parts.splits;
    const index_t blocks = index_t(gridDim.x) / parts.splits / heads, row = item % heads;
    // The last query rows see most tokens: they go first, so that no long block is left for the end.
    first_row = (blocks - 1 - item / heads) * Rows::block_rows;
    const index_t head = row % p.view.kv_heads;
    at = {row / p.view.kv_heads, head, head * group, group, 0, p.q.tokens * group};
    at.stored = max(p.view.length(at.sequence, at.head), 0);
    const auto range = Rows::seen(p, at, Rows::position_of(p, at, first_row),
                                  Rows::position_of(p, at, first_row + Rows::block_rows - 1));
    const index_t begin = range.begin / tile, tiles = max(ceil_div(range.end, tile) - begin, 0);
    first_tile = begin + index_t(offset_t(tiles) * part / parts.splits);
    count = begin + index_t(offset_t(tiles) * (part + 1) / parts.splits) - first_tile;
  }

  __device__ index_t gather(const problem_type&) { return count; }
  __device__ bool has_more() const { return false; }

  __device__ void ask(const problem_type& p, index_t row, index_t rows) {
    const index_t oldest = Rows::position_of(p, at, row), newest = Rows::position_of(p, at, row + rows - 1);
    by_any = Rows::seen(p, at, oldest, newest), by_all = Rows::seen(p, at, newest, oldest);
  }

  template <class ToKey, class ToValue>
  __device__ void copy(const problem_type& p, index_t t, int warp, int lane, const ToKey& to_key,
                       const ToValue& to_value) const {
    const index_t mine = (first_tile + t) * tile + warp * Rows::warp_share + lane % Rows::warp_share;
    Rows::copy_tile(p, at, mine, mine < at.stored, warp, lane, to_key, to_value);
  }

  __device__ bool meets(const problem_type&, index_t t) const {
    const index_t first = (first_tile + t) * tile;
    return by_any.meets(first, first + tile);
  }
  __device__ bool is_masked(const problem_type&, index_t t) const {
    const index_t first = (first_tile + t) * tile;
    return !by_all.covers(first, first + tile);
  }

  __device__ void mask(const problem_type& p, index_t warp_row, index_t t, int lane, logits& s) const {
    const index_t first = (first_tile + t) * tile;
    index_t query[row_tiles * 2];
#pragma unroll
    for (int r = 0; r < row_tiles * 2; ++r) query[r] = Rows::position_of(p, at, warp_row + r * 8 + lane / 4);
#pragma unroll
    for (int i = 0; i < tile / 4; ++i) {
      const index_t slot = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
      const bool stored = slot < at.stored;
      const index_t key = stored ? p.view.position(at.sequence, at.head, slot) : 0;
#pragma unroll
      for (int r = 0; r < row_tiles * 2; ++r) {
        float& x = s[r / 2][i / 2][r % 2 * 2 + i % 2];
        x = stored && p.rule.visible(query[r], key) ? x : -infinity;
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
