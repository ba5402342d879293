// What a block of the decode kernel works on: all rows' tiles, laid end to end and cut evenly.
#pragma once

#include "decode_problem.cuh"
#include "decode_schedule.cuh"
#include "decode_tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// One (sequence, kv_head) row of K and V.
struct decode_row {
  index_t sequence, head, count;
  const index_t* chosen;  // its selected slots, or null
};

template <class View, class Out>
struct decode_block {
  using config = decode_config<View>;
  using problem_type = decode_problem<View, Out>;
  static constexpr int warps = config::warps, tokens = config::tokens, threads = config::threads, tile = config::tile;

  const problem_type& p;
  const decode_scratch& scratch;
  unsigned char* memory;  // rings, then partial outputs
  index_t* ends;          // of rows, in tiles
  index_t rows, group, query_rows, first_query;
  index_t restart = 0;  // tiles that a row's beginning counts for when work is cut
  int used;             // query rows of this block
  int warp, lane;

  /// The part of a piece that lies in one row.
  struct segment {
    index_t row, row_begin, row_end;  // in tiles of all rows; `restart` of them stand before a row's beginning
    index_t next_end;                 // of the next row, if there is one
    index_t first_tile, last_tile;    // in tiles of this row
    decode_row at;
  };

  __device__ decode_block(const problem_type& p_, const decode_scratch& scratch_, unsigned char* memory_,
                          index_t* ends_)
      : p(p_), scratch(scratch_), memory(memory_), ends(ends_) {
    rows = p.view.sequences * p.view.kv_heads;
    group = p.q.heads / p.view.kv_heads;
    query_rows = p.q.tokens * group;
    first_query = index_t(blockIdx.y) * rows_per_block;
    used = int((min)(index_t(rows_per_block), query_rows - first_query));
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
  }

  /// Brings the launch's parameters to the constant cache, a line of 64 bytes at a time, while earlier launches run:
  /// each would be waited for at its first use (0.3 us of a step; H200, CUDA 13.0). The sum only keeps the loads.
  __device__ void touch_parameters(index_t* warp_totals) const {
    std::uint32_t sum = *(reinterpret_cast<const std::uint32_t*>(&scratch + 1) - 1);
#pragma unroll
    for (std::size_t i = 0; i < sizeof(p); i += 64) {
      sum += *reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const unsigned char*>(&p) + i);
    }
    if (lane == 31) *static_cast<volatile index_t*>(warp_totals + warp) = index_t(sum);
  }

  __device__ static index_t count_of(const problem_type& p, index_t row) {
    const index_t sequence = small_quotient(row, p.view.kv_heads);
    return p.chosen.indices ? p.chosen.count(row) : p.view.length(sequence, row - sequence * p.view.kv_heads);
  }
  __device__ index_t begin_of(index_t row) const { return row ? ends[row - 1] : 0; }
  __device__ index_t token_of(index_t t) const { return t * tile + warp * tokens; }

  __device__ static index_t tiles_of(index_t count) { return (count + tile - 1) / tile; }

  /// What a row's beginning counts for in a block's work, in tiles: 2, 3, 4 and 6 took 1.06, 1.04, 1.02 and 1.00 of
  /// evened lengths where they are drawn (H200, CUDA 13.0).
  static constexpr index_t restart_tiles = 6;
  /// Rows of a lane where every warp scans all of them for itself.
  static constexpr int rows_each = 4;

  /// The rows' ends in `ends`, and the cut of all of their tiles. `first` is this block's first segment if it has one.
  /// Up to 128 rows every warp scans for itself and waits for nobody; `ends` is there after the next barrier.
  __device__ even_pieces plan(segment& first, block_scan<threads, index_t>& scan) {
    const index_t me = blockIdx.x;
    if (rows <= 32) return plan_in_warp<1>(first);
    if (rows <= 32 * rows_each) return plan_in_warp<rows_each>(first);
    scan_units<threads>(rows, ends, scan, [&](index_t row) { return tiles_of(count_of(p, row)); });
    index_t tiles = ends[rows - 1];
    if (tiles >= index_t(gridDim.x) * (restart_tiles + 2) && !rows_are_equal(tiles)) {
      restart = restart_tiles;
      scan_units<threads>(rows, ends, scan, [&](index_t row) {
        const index_t own = tiles_of(count_of(p, row));
        return own > 0 ? own + restart_tiles : 0;
      });
      tiles = ends[rows - 1];
    }
    const even_pieces cut(tiles, decode_pieces(tiles, index_t(gridDim.x), rows, false));
    if (me < cut.count && cut.units > 0) {
      first = segment_at(row_of_unit_in_warp(ends, rows, cut.begin(me), lane), cut.begin(me), cut.begin(me + 1));
    }
    return cut;
  }
  /// Whether all rows have as many tiles, by the whole block; a barrier.
  __device__ bool rows_are_equal(index_t tiles) const {
    bool equal = true;
    for (index_t row = threadIdx.x; row < rows; row += threads)
      equal &= offset_t(ends[row]) * rows == offset_t(tiles) * (row + 1);
    return __syncthreads_and(equal);
  }
  template <int Each>
  __device__ even_pieces plan_in_warp(segment& first) {
    index_t count[Each], end[Each], sum = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) count[i] = count_of(p, (min)(lane * Each + i, rows - 1));
#pragma unroll
    for (int i = 0; i < Each; ++i) end[i] = sum += lane * Each + i < rows ? tiles_of(count[i]) : 0;
    const index_t before = inclusive_sum(sum, lane) - sum;
#pragma unroll
    for (int i = 0; i < Each; ++i) end[i] += before;
    index_t tiles = __shfl_sync(~0u, end[Each - 1], 31);
    bool equal = true;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const index_t row = lane * Each + i;
      equal &= row >= rows || end[i] * rows == tiles * (row + 1);
    }
    equal = __all_sync(~0u, equal);
    if (!equal && tiles >= index_t(gridDim.x) * (restart_tiles + 2)) tiles = count_restarts(end);
    const even_pieces cut(tiles, decode_pieces(tiles, index_t(gridDim.x), rows, equal));
    const index_t begin = cut.begin(index_t(blockIdx.x));
    index_t ended = 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      ended += __popc(__ballot_sync(~0u, lane * Each + i < rows && end[i] <= begin));
      if (warp == 0 && lane * Each + i < rows) ends[lane * Each + i] = end[i];
    }
    const index_t row = (min)(ended, rows - 1);
    // Lanes pick their share of the row before they hand it on.
    const auto of_row = [&](const index_t(&values)[Each], index_t r) {
      index_t mine = 0;
#pragma unroll
      for (int i = 0; i < Each; ++i) mine |= values[i] & -index_t(r % Each == i);
      return __shfl_sync(~0u, mine, r / Each);
    };
    first.row = ended;
    first.row_end = of_row(end, row);
    first.row_begin = (row ? of_row(end, row - 1) : 0) + restart;
    first.next_end = of_row(end, (min)(row + 1, rows - 1));
    first.at.count = of_row(count, row);
    first.at.sequence = small_quotient(row, p.view.kv_heads);
    first.at.head = row - first.at.sequence * p.view.kv_heads;
    first.at.chosen = p.chosen.indices ? p.chosen.row(row) : nullptr;
    first.first_tile = (max)(begin - first.row_begin, 0);
    first.last_tile = (min)(cut.begin(index_t(blockIdx.x) + 1), first.row_end) - first.row_begin;
    return cut;
  }
  /// Uneven rows: a block that begins another one has to fill its ring again, and gets so much less to read. Adds that
  /// to the ends of rows; returns the last of them.
  template <int Each>
  __device__ index_t count_restarts(index_t (&end)[Each]) {
    restart = restart_tiles;
    const index_t before_lane = __shfl_up_sync(~0u, end[Each - 1], 1);
    index_t begun[Each], sum = 0, before = lane ? before_lane : 0;
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      begun[i] = sum += end[i] > before;
      before = end[i];
    }
    const index_t earlier = inclusive_sum(sum, lane) - sum;
#pragma unroll
    for (int i = 0; i < Each; ++i) end[i] += (earlier + begun[i]) * restart;
    return __shfl_sync(~0u, end[Each - 1], 31);
  }
  /// This block's part of a row where the split was made ahead; false: each step cuts for itself. No parts: nothing to
  /// read. A row that has become shorter than its parts are many has fewer of them.
  __device__ bool find_split(segment& only, row_parts& parts) const {
    const int4 found = *reinterpret_cast<const int4*>(scratch.split + blockIdx.x);
    const split_piece mine{found.x, found.y, found.z, found.w};
    if (mine.kind == split_piece::cut_each_step) return false;
    parts = {index_t(blockIdx.x) - mine.part, 0};
    if (mine.kind == split_piece::nothing) return true;
    const index_t sequence = small_quotient(mine.row, p.view.kv_heads), count = count_of(p, mine.row);
    const index_t tiles = tiles_of(count), some = (min)(mine.parts, tiles);
    only.row = mine.row;
    only.at = {sequence, mine.row - sequence * p.view.kv_heads, count,
               p.chosen.indices ? p.chosen.row(mine.row) : nullptr};
    if (mine.part >= (max)(some, 1)) return true;
    parts.count = (max)(some, 1);
    const even_pieces cut(tiles, parts.count);
    only.row_begin = 0, only.row_end = only.next_end = tiles;
    only.first_tile = cut.begin(mine.part), only.last_tile = cut.begin(mine.part + 1);
    return true;
  }
  __device__ segment segment_at(index_t row, index_t begin, index_t end) const {
    const index_t row_begin = begin_of(row) + restart, row_end = ends[row];
    const index_t sequence = row / p.view.kv_heads, head = row % p.view.kv_heads;
    return {row,
            row_begin,
            row_end,
            ends[(min)(row + 1, rows - 1)],
            (max)(begin - row_begin, 0),
            (min)(end, row_end) - row_begin,
            decode_row{sequence, head, count_of(p, row), p.chosen.indices ? p.chosen.row(row) : nullptr}};
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
