// The tiles of dense prefill attention: neighbouring slots, masked by the rule alone.
#pragma once

#include "prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The tiles that a block of a prefill kernel reads, and which of their slots its rows see. A kernel takes any type
/// with
///   argument, memory_bytes                 a launch's argument besides the problem; shared memory of a block
///   one_piece                              whether `gather` is called only once
///   (p, parts, item, argument, memory)     constructs it for an item; `source` and `first_row` are its query rows
///   gather(p)                              lists the tiles of the next piece and returns their number; every
///                                          listing thread calls it, without a barrier before it
///   has_more                               whether another piece follows
///   ask(p, first_row, rows)                sets the block's rows for the calls below
///   gathers, gathered()                    whether rows may also be gathered in other memory; the maps of that memory
///   gathered_row(t)                        the tile's first row there; no_index: it is not gathered
///   slot_of(t, row)                        the slot of row `row` of the piece's tile t; `source.stored` or more: none
///   is_in_chunks(t)                        whether each 32 of its rows are stored, neighbouring slots that begin at a
///                                          multiple of 32
///   meets(p, t), is_masked(p, t)           whether any row sees any of it; whether any row does not see all of it
///   visible_bits(p, t, c, row)             bits of those of the 32 slots of the tile's chunk c that a row sees
///   visible_bits(p, t, query, bits)        the same for all its chunks, by the row's position
template <class Rows>
struct dense_tiles {
  using problem_type = typename Rows::problem_type;
  using item_rows = typename Rows::item_rows;
  static constexpr int tile = Rows::tile, memory_bytes = 0;
  static constexpr bool one_piece = true, gathers = false;
  struct argument {};

  item_rows source;
  index_t first_row, first_tile, count;
  typename Rows::slot_range by_any, by_all;

  /// Part `item` % splits of the range that query rows [first_row, first_row + block_rows) see.
  __device__ dense_tiles(const problem_type& p, const prefill_parts& parts, index_t item, const argument&,
                         unsigned char*) {
    const index_t group = p.q.heads / p.view.kv_heads;
    const index_t part = item % parts.splits;
    const block_place block = place_of(p, parts, item / parts.splits);
    first_row = block.block * Rows::block_rows;
    const index_t head = block.row % p.view.kv_heads;
    source = {block.row / p.view.kv_heads, head, head * group, group, 0, p.q.tokens * group, item};
    source.stored = (max)(p.view.length(source.sequence, source.head), 0);
    const auto range = Rows::visible_range(p, source, Rows::position_of(p, source, first_row),
                                           Rows::position_of(p, source, first_row + Rows::block_rows - 1));
    const index_t begin = range.begin / tile, tiles = (max)(ceil_div(range.end, tile) - begin, 0);
    first_tile = begin + index_t(offset_t(tiles) * part / parts.splits);
    count = begin + index_t(offset_t(tiles) * (part + 1) / parts.splits) - first_tile;
  }

  __device__ index_t gather(const problem_type&) { return count; }
  __device__ bool has_more() const { return false; }

  __device__ void ask(const problem_type& p, index_t row, index_t rows) {
    const index_t oldest = Rows::position_of(p, source, row), newest = Rows::position_of(p, source, row + rows - 1);
    by_any = Rows::visible_range(p, source, oldest, newest), by_all = Rows::visible_range(p, source, newest, oldest);
  }

  __device__ index_t slot_of(index_t t, index_t row) const { return (first_tile + t) * tile + row; }

  __device__ bool is_in_chunks(index_t t) const { return (first_tile + t + 1) * tile <= source.stored; }

  __device__ bool meets(const problem_type&, index_t t) const {
    const index_t first = (first_tile + t) * tile;
    return by_any.meets(first, first + tile);
  }
  __device__ bool is_masked(const problem_type&, index_t t) const {
    const index_t first = (first_tile + t) * tile;
    return !by_all.covers(first, first + tile);
  }
  __device__ void visible_bits(const problem_type& p, index_t t, index_t query,
                               std::uint32_t (&bits)[Rows::tile_chunks]) const {
#pragma unroll
    for (int c = 0; c < Rows::tile_chunks; ++c) {
      bits[c] = Rows::visible_slots(p, source, query, (first_tile + t) * tile + c * Rows::chunk_slots);
    }
  }
  __device__ std::uint32_t visible_bits(const problem_type& p, index_t t, index_t c, index_t row) const {
    return Rows::visible_slots(p, source, Rows::position_of(p, source, row),
                               (first_tile + t) * tile + c * Rows::chunk_slots);
  }

 private:
  struct block_place {
    index_t row, block;  // the (sequence, kv_head); the block of its query rows, oldest first
  };
  /// The rows of the `item`-th block. Blocks that see the most tokens go first, so that no long block is left for the
  /// end: the last query rows, and heads that store more. A head that stores less begins later by as many turns. Each
  /// warp calls it. The merge of parts takes heads in turn.
  /// Slower: heads always in turn took 150 ms where this takes 113 (a layer of 128K in chunks of 2,048, heads that keep
  /// 5 to 57 %, H200).
  __device__ static block_place place_of(const problem_type& p, const prefill_parts& parts, index_t item) {
    const index_t rows = p.view.sequences * p.view.kv_heads, lane = index_t(threadIdx.x % 32);
    const index_t blocks = parts.items / parts.splits / rows;
    const block_place in_turn{item % rows, blocks - 1 - item / rows};
    const bool alike = p.view.sequences == 1 && p.view.length_strides.head == 0;
    if (parts.splits > 1 || alike) return in_turn;
    const index_t block_tokens = (max)(Rows::block_rows / (p.q.heads / p.view.kv_heads), 1);
    const auto stored = [&](index_t row) {
      return (max)(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads), 0);
    };
    index_t longest = 0, shortest = stored(0);
    for (index_t row = lane; row < rows; row += 32) {
      longest = (max)(longest, stored(row)), shortest = (min)(shortest, stored(row));
    }
    longest = __reduce_max_sync(~0u, longest), shortest = __reduce_min_sync(~0u, shortest);
    if (longest - shortest < block_tokens) return in_turn;

    const auto turns_late = [&](index_t row) { return (longest - stored(row)) / block_tokens; };
    const auto begun = [&](index_t row, index_t turn) { return (min)((max)(turn - turns_late(row), 0), blocks); };
    const auto all_begun = [&](index_t turn) {
      index_t sum = 0;
      for (index_t row = lane; row < rows; row += 32) sum += begun(row, turn);
      return warp_sum(sum);
    };
    const index_t turn =
        first_where(longest / block_tokens + blocks, [&](index_t i) { return all_begun(i + 1) > item; });
    index_t left = item - all_begun(turn);  // blocks of this turn before this one
    for (index_t first = 0;; first += 32) {
      const index_t row = first + lane;
      const unsigned begin = __ballot_sync(~0u, row < rows && begun(row, turn) < begun(row, turn + 1));
      if (left < __popc(begin)) {
        const bool is_it = begin >> lane & 1 && __popc(begin & Rows::low_bits(lane)) == left;
        const index_t found = first + __ffs(int(__ballot_sync(~0u, is_it))) - 1;
        return {found, blocks - 1 - (turn - turns_late(found))};
      }
      left -= __popc(begin);
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
