// Which block of decode attention reads which tokens: the kernel's tuning, how a step cuts the tiles of all rows into
// pieces, and how rows are split ahead.
#pragma once

#include <type_traits>

#include "../../../../../core/views.hpp"
#include "../../../device/copy.cuh"
#include "../../../device/tuning.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../attention_problems.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// How a block of the decode kernel stages K and V.
struct decode_tuning {
  int warps = 8;    ///< warps of a block; each stages and reads its own tiles
  int tokens = 16;  ///< tokens of a warp's tile, 16 or 32
  int stages = 3;   ///< tiles in a warp's ring; one of them is being read
  int blocks = 1;   ///< blocks wanted on a multiprocessor
};

namespace detail {

/// Rows that lie in shared memory as they do in device memory, side by side.
struct staged_words {
  int row_bytes, chunk_bytes, chunks;
  TESSERA_HD constexpr explicit staged_words(int of_row)
      : row_bytes(of_row),
        chunk_bytes(of_row % 16 == 0  ? 16
                    : of_row % 8 == 0 ? 8
                                      : 4),
        chunks(of_row / chunk_bytes) {}
  TESSERA_HD constexpr int bytes() const { return row_bytes; }
  TESSERA_HD constexpr std::uint32_t offset(int row, int chunk) const {
    return std::uint32_t(row * row_bytes + chunk * chunk_bytes);
  }
};

/// Whether the kernel reads the codes of a row's groups.
template <class Stored>
inline constexpr bool reads_codes = false;
template <int Bits>
inline constexpr bool reads_codes<code_group<Bits, 64>> = true;

/// How rows of `dim` elements lie in shared memory, if those of other encodings take `element_bytes` an element there.
template <class Stored>
TESSERA_HD constexpr auto staged_rows_of(int dim, int element_bytes) {
  if constexpr (reads_codes<Stored>) {
    return staged_words(dim / 64 * int(sizeof(Stored)));
  } else {
    return staged_rows{dim * element_bytes / 16};
  }
}

/// How a view's rows lie in shared memory: plain rows, fp8 and int8 as they are stored, bytes followed by their scales,
/// groups of 64 as they are stored. Rows of any other encoding are decoded.
template <class View>
struct decode_format {
  using encoding_type = typename View::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  static constexpr bool bytes = std::is_same_v<stored_type, fp8> || std::is_same_v<stored_type, int8>;
  static constexpr bool groups = reads_codes<stored_type>;
  static constexpr bool decoded = !View::is_raw && !bytes && !groups, scaled = bytes && encoding_type::scaled;
  static constexpr int element_bytes = bytes ? 1 : 2;
  static constexpr auto k_rows = staged_rows_of<stored_type>(View::k_dim, element_bytes);
  static constexpr auto v_rows = staged_rows_of<stored_type>(View::v_dim, element_bytes);
  /// Of K and V, without padding.
  static constexpr int row_bytes =
      groups ? k_rows.bytes() + v_rows.bytes() : (View::k_dim + View::v_dim) * element_bytes;
  static constexpr int token_bytes = k_rows.bytes() + v_rows.bytes() + (scaled ? 2 * int(sizeof(float)) : 0);
};

/// Query rows that a block reads a tile for: those of its matrix products. Codes are the left side of a product, plain
/// rows and bytes the right side.
template <class View>
inline constexpr int rows_per_block = decode_format<View>::groups ? 8 : 16;

template <class View>
TESSERA_HD constexpr int stage_bytes(const decode_tuning& tuning) {
  return tuning.tokens * decode_format<View>::token_bytes;
}
/// Floats from one partial output row in shared memory to the next: neighbouring rows begin 8 banks apart.
TESSERA_HD constexpr int merge_pitch(int v_dim) { return v_dim + 8; }
/// Bytes of one warp's ring. The warp's partial output overwrites it at the end.
template <class View>
TESSERA_HD constexpr int warp_bytes(const decode_tuning& tuning) {
  const int ring = tuning.stages * stage_bytes<View>(tuning);
  const int merge = rows_per_block<View> * (merge_pitch(View::v_dim) * 4 + 8);
  return ((ring > merge ? ring : merge) + 127) / 128 * 128;
}
template <class View>
TESSERA_HD constexpr int decode_shared_bytes(const decode_tuning& tuning) {
  return tuning.warps * warp_bytes<View>(tuning);
}

/// The architecture that this pass compiles device code for. The host asks the loaded kernel
/// (`cudaFuncAttributes::ptxVersion`).
#ifdef __CUDA_ARCH__
inline constexpr int compiled_capability = __CUDA_ARCH__ / 10;
#else
inline constexpr int compiled_capability = 90;
#endif

}  // namespace detail

/// Tuned on sm_90 (H200, CUDA 13.0). The other values follow from the architecture's shared memory and have not been
/// timed. Rows of groups are bound by instructions: two blocks of 4 warps take 354 us for codes of 4 (B8 128K), one of
/// 8 warps 380, one of 16 warps 447, because it spills.
template <class View>
TESSERA_HD constexpr decode_tuning decode_tuning_for(int compute_capability) {
  // Bytes that rings may take on one multiprocessor. The rest holds 4 KiB of row ends, as much of a merge's shares, and
  // what the system reserves.
  const int limit = shared_memory_of(compute_capability) / 1024;
  const int shared = (limit - (limit > 163 ? 15 : limit > 99 ? 11 : 10)) * 1024;
  decode_tuning tuning;
  tuning.tokens = detail::decode_format<View>::row_bytes <= 256 ? 32 : 16;
  tuning.blocks = detail::decode_format<View>::groups ? 2 : 1;
  const int warps = 8 / tuning.blocks;
  for (tuning.warps = warps; tuning.warps > 1; tuning.warps /= 2) {
    for (tuning.stages = 4; tuning.stages > (tuning.warps == warps ? 2 : 1); --tuning.stages) {
      if (detail::decode_shared_bytes<View>(tuning) * tuning.blocks <= shared - (tuning.blocks - 1) * 10240)
        return tuning;
    }
  }
  return tuning;
}

namespace detail {

/// The tuning of the code that is being compiled.
template <class View>
struct decode_config {
  static constexpr decode_tuning tuning = decode_tuning_for<View>(compiled_capability);
  static constexpr int warps = tuning.warps, tokens = tuning.tokens, stages = tuning.stages;
  static constexpr int threads = warps * 32, tile = warps * tokens;
};

// Which tokens a block of the decode kernel reads: the tiles of all rows, laid end to end and cut into even pieces.

inline constexpr int max_rows = 1024;  // (sequence, kv_head) rows whose tile counts fit the block's scan

/// What the kernel has at most of static shared memory: ends of rows, a merge's shares, a scan and a flag.
TESSERA_HD constexpr std::size_t decode_static_bytes(const decode_tuning& tuning) {
  return max_rows * sizeof(index_t) + std::size_t(tuning.warps) * (32 * 16 + 8 + 4) + 16;
}

inline constexpr int max_blocks = max_pieces;

/// The part that a block reads under a split made ahead.
struct alignas(16) split_piece {
  index_t row, part, parts, kind;
  /// A workspace begins with `cut_each_step`.
  static constexpr index_t cut_each_step = 0, part_of_row = 1, nothing = 2;
};

/// The pieces that hold a row. Each piece belongs to one block.
struct row_parts {
  index_t first_piece, count;
};

/// Scratch: a counter per (query block, row), then partial outputs and softmax states by slot = piece + row.
struct decode_scratch {
  const split_piece* split;  // [pieces]; read only where splits are made ahead
  unsigned* arrived;         // [query blocks, max_rows]: parts of a row that are written
  float* out;                // [query blocks, slots, 16, v_dim]
  float2* state;             // [query blocks, slots, 16] maximum (base 2) and sum
  index_t max_rows;          // upper bound; a problem may have fewer
  index_t slots;             // upper bounds of pieces and of rows, added
};

/// Into how many pieces, one per block, `tiles` tiles of `rows` rows are cut. If rows are equal and divide the pieces,
/// pieces end where rows do: a block that straddles two rows pays for another merge.
__device__ inline index_t decode_pieces(index_t tiles, index_t most, index_t rows, bool equal) {
  const index_t count = (min)(most, (max)(tiles, 1));
  // Short pieces of equal rows: as many pieces as the rows divide, if few blocks are idle then, so that fewer merges
  // are needed. Long pieces need every multiprocessor (B8 128K: 944 us on 132, 967 us on 128; H200, CUDA 13.0).
  const index_t spare = equal && rows <= count ? count - small_quotient(count, rows) * rows : count;
  const index_t even = spare * 16 <= count && tiles < count * 128 ? count - spare : count;
  // A merge through global memory takes longer than reading a second tile; where most multiprocessors have a row, it
  // takes longer than reading a third and a fourth (64 rows of 512 tokens: 10.0 us in halves, 9.0 whole; 8 rows: 6.4 us
  // in quarters, 8.0 whole; 8 rows of 256: 6.3 in halves, 5.7 whole; H200, CUDA 13.0).
  return rows < even && (tiles <= rows * 2 || (tiles <= rows * 4 && rows * 3 > even)) ? rows : even;
}

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
  index_t* ends;          // where each row ends, in tiles
  index_t rows, group, query_rows, first_query;
  index_t restart = 0;  // tiles of work that beginning a row counts for
  int used;             // query rows of this block
  int warp, lane;

  /// The part of a piece that lies in one row.
  struct segment {
    index_t row, row_begin, row_end;  // in tiles of all rows; `restart` of them stand before a row's first tile
    index_t next_end;                 // where the next row ends, if there is one
    index_t first_tile, last_tile;    // in tiles of this row
    decode_row source;
  };

  __device__ decode_block(const problem_type& p_, const decode_scratch& scratch_, unsigned char* memory_,
                          index_t* ends_)
      : p(p_), scratch(scratch_), memory(memory_), ends(ends_) {
    rows = p.view.sequences * p.view.kv_heads;
    group = p.q.heads / p.view.kv_heads;
    query_rows = p.q.tokens * group;
    first_query = index_t(blockIdx.y) * rows_per_block<View>;
    used = int((min)(index_t(rows_per_block<View>), query_rows - first_query));
    warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
  }

  /// Loads the launch's parameters into the constant cache, a line of 64 bytes at a time, while earlier launches run.
  /// Otherwise the kernel waits for each line at its first use (0.3 us of a step; H200, CUDA 13.0). The sum only keeps
  /// the compiler from removing the loads.
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

  /// How many tiles beginning a row counts for in a block's work. With 2, 3, 4 and 6, random lengths took 1.06, 1.04,
  /// 1.02 and 1.00 times as long as even ones (H200, CUDA 13.0).
  static constexpr index_t restart_tiles = 6;
  /// How many rows a lane has if every warp scans all rows by itself.
  static constexpr int rows_each = 4;

  /// Writes the rows' ends to `ends` and returns the cut of all tiles. Sets `first` to this block's first segment, if
  /// it has one. Up to 128 rows, every warp scans by itself without waiting; `ends` is complete after the next barrier.
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
  /// Whether all rows have `tiles` tiles. The whole block calls it; it contains a barrier.
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
    // Lanes pick their share of the row before they pass it on.
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
    first.source.count = of_row(count, row);
    first.source.sequence = small_quotient(row, p.view.kv_heads);
    first.source.head = row - first.source.sequence * p.view.kv_heads;
    first.source.chosen = p.chosen.indices ? p.chosen.row(row) : nullptr;
    first.first_tile = (max)(begin - first.row_begin, 0);
    first.last_tile = (min)(cut.begin(index_t(blockIdx.x) + 1), first.row_end) - first.row_begin;
    return cut;
  }
  /// For uneven rows: a block that begins another row has to refill its ring, so it gets fewer tiles. Adds this cost to
  /// the rows' ends and returns the last end.
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
  /// Finds this block's part of a row if the split was made ahead. Returns false if each step makes its own cut. No
  /// parts: nothing to read. A row with fewer tiles than planned parts has fewer parts.
  __device__ bool find_split(segment& only, row_parts& parts) const {
    const int4 found = *reinterpret_cast<const int4*>(scratch.split + blockIdx.x);
    const split_piece mine{found.x, found.y, found.z, found.w};
    if (mine.kind == split_piece::cut_each_step) return false;
    parts = {index_t(blockIdx.x) - mine.part, 0};
    if (mine.kind == split_piece::nothing) return true;
    const index_t sequence = small_quotient(mine.row, p.view.kv_heads), count = count_of(p, mine.row);
    const index_t tiles = tiles_of(count), some = (min)(mine.parts, tiles);
    only.row = mine.row;
    only.source = {sequence, mine.row - sequence * p.view.kv_heads, count,
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

// Which blocks of decode attention read which rows, decided ahead: when sequences or lengths change by much, not in a
// step.

/// When the rows of a batch are split among the blocks of decode attention.
enum class decode_split {
  each_step,  ///< by every block, in every launch: even pieces, which may continue from one row into the next
  ahead       ///< by `decode_attention::split`, called when lengths change by much: rows in whole blocks
};

/// How many blocks a split ahead gives each row.
enum class split_rule {
  shortest,  ///< so many that the longest part is as short as can be; each step cuts by itself where that is shorter
  rounded    ///< its share of the tiles, rounded, at least one: TANGRAM, arXiv:2606.06302, algorithm 1
};

namespace detail {

/// How many parts a row of `tiles` tiles has if a part has at most `most` tiles.
__device__ inline index_t parts_in(index_t tiles, index_t most) { return (max)(1, (tiles + most - 1) / most); }
/// How many of `blocks` blocks a row of `tiles` of all `sum` tiles has, rounded. All together may have more.
__device__ inline index_t rounded_parts(index_t tiles, index_t sum, index_t blocks) {
  const offset_t both = 2 * (offset_t)(max)(sum, 1);
  return index_t((max)(offset_t(1), (2 * offset_t(tiles) * blocks + sum) / both));
}

/// Makes `split [blocks]` from the problem's present lengths, by one warp. Every row gets blocks of its own, by `rule`.
/// No block begins a second row, so parts stay even while rows grow. Each step cuts by itself instead if there are more
/// rows than blocks; under `shortest` also if even pieces are shorter, the cost of beginning a row included, or if rows
/// are short.
/// TANGRAM's algorithm 1 rounds each row's share of the blocks and may need more of them than there are, which wait for
/// each other. Differs: shares are of as many blocks as let all parts have one; and rows are those of the whole batch,
/// by their lengths now.
template <class View, class Out>
__global__ void __launch_bounds__(32) split_entry(const __grid_constant__ decode_problem<View, Out> p,
                                                  split_piece* split, index_t blocks, split_rule rule) {
  using block = decode_block<View, Out>;
  __shared__ index_t tiles[max_rows];
  const index_t lane = index_t(threadIdx.x), rows = p.view.sequences * p.view.kv_heads;
  index_t sum = 0, longest = 1;
  for (index_t row = lane; row < rows; row += 32) {
    tiles[row] = block::tiles_of(block::count_of(p, row));
    sum += tiles[row];
    longest = (max)(longest, tiles[row]);
  }
  sum = warp_sum(sum);
  longest = __reduce_max_sync(~0u, longest);
  __syncwarp();
  const bool rounds = rule == split_rule::rounded;
  const auto parts_of = [&](index_t row, index_t by) {
    return rounds ? rounded_parts(tiles[row], sum, blocks - by) : parts_in(tiles[row], by);
  };
  // The smallest part length at which every part has a block; or how many blocks fewer shares are of.
  index_t least = rounds ? 0 : (max)((sum + blocks - 1) / blocks, 1), most = rounds ? blocks - 1 : longest;
  while (least < most) {
    const index_t middle = (least + most) / 2;
    index_t parts = 0;
    for (index_t row = lane; row < rows; row += 32) parts += parts_of(row, middle);
    if (warp_sum(parts) <= blocks) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  const index_t of_even_pieces = (sum + block::restart_tiles * rows + blocks - 1) / blocks;
  const bool ahead = rows <= blocks && (rounds || (most <= of_even_pieces && sum > 4 * rows));
  index_t done = 0;
  for (index_t first = 0; ahead && first < rows; first += 32) {
    const index_t row = first + lane, parts = row < rows ? parts_of(row, most) : 0;
    const index_t end = done + inclusive_sum(parts, int(lane));
    for (index_t part = 0; part < parts; ++part)
      split[end - parts + part] = {row, part, parts, split_piece::part_of_row};
    done = __shfl_sync(~0u, end, 31);
  }
  for (index_t piece = done + lane; piece < blocks; piece += 32)
    split[piece] = {0, 0, 0, ahead ? split_piece::nothing : split_piece::cut_each_step};
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
