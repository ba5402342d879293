// The tiles of attention along lines: the stored slots that slash lines meet, and the slots of vertical lines.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../choose/lines/choose_lines.cuh"
#include "../../../device/check.cuh"
#include "../../../device/warp.cuh"
#include "dense_tiles.cuh"
#include "tensor_map.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The rows of vertical lines are gathered into contiguous memory before attention along lines, so that the copy engine
// can fetch them too.

/// Scratch in which attention along lines may gather rows, aligned to 16 bytes.
/// Slower: if each block gathers them itself, 60.7 ms where this took 59.1 (10 % of 128K, d 128, bf16, H200, CUDA
/// 13.0).
struct column_memory {
  void* data = nullptr;
  std::size_t bytes = 0;
};

namespace detail {

/// A launch's argument besides the problem: its lines.
struct line_argument {
  line_tables lines;
  row_maps columns;      // of gathered rows, a tile per box; box_rows 0: nothing is gathered
  index_t capacity = 0;  // rows that may be gathered
};

/// How many gathered rows a head has. They are whole tiles, wherever its first row begins, with zeros after its own
/// rows.
template <int Tile>
__device__ index_t gathered_rows(index_t columns) {
  return (columns / Tile + 2) * Tile;
}
/// Where the gathered rows of a head's vertical lines begin; no_index: they do not fit. A warp calls it.
template <int Tile>
__device__ index_t gathered_at(const line_tables& lines, index_t q_head, index_t room) {
  offset_t before = 0;
  for (index_t head = index_t(threadIdx.x % 32); head < q_head; head += 32) {
    before += gathered_rows<Tile>(lines.column_counts[head]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
  return before + gathered_rows<Tile>(lines.column_counts[q_head]) <= room ? index_t(before) : no_index;
}

/// Copies the rows of a query head's vertical lines; gridDim.y query heads.
template <class View, int Tile, int Threads>
__global__ void __launch_bounds__(Threads)
    gather_columns_entry(const __grid_constant__ View view, line_tables lines, index_t room,
                         typename View::element_type* keys, typename View::element_type* values) {
  constexpr int D = View::k_dim, Dv = View::v_dim, chunks = (D + Dv) / 8;
  const index_t q_head = index_t(blockIdx.y), head = q_head / (index_t(gridDim.y) / view.kv_heads);
  const index_t begin = gathered_at<Tile>(lines, q_head, room);
  if (begin == no_index) return;
  const index_t columns = lines.column_counts[q_head], stored = view.length(0, head);
  const index_t* const slots = lines.columns_of(q_head);
  const offset_t all = offset_t(gathered_rows<Tile>(columns)) * chunks;
#pragma unroll 4
  for (offset_t i = offset_t(blockIdx.x) * Threads + threadIdx.x; i < all; i += offset_t(gridDim.x) * Threads) {
    const index_t row = index_t(i / chunks);
    const int chunk = int(i % chunks);
    const index_t slot = row < columns ? slots[row] : no_index;
    uint4 copied = {};
    if (slot >= 0 && slot < stored) {
      const auto* from =
          chunk < D / 8 ? view.key(0, head, slot) + chunk * 8 : view.value(0, head, slot) + (chunk - D / 8) * 8;
      copied = __ldg(reinterpret_cast<const uint4*>(from));
    }
    auto* to = chunk < D / 8 ? keys + offset_t(begin + row) * D + chunk * 8
                             : values + offset_t(begin + row) * Dv + (chunk - D / 8) * 8;
    *reinterpret_cast<uint4*>(to) = copied;
  }
}

/// Gathers the rows of all heads whose rows fit, and records where they begin.
template <class View, int Tile>
void gather_columns(const View& view, index_t q_heads, const column_memory& memory, line_argument& argument,
                    cudaStream_t stream) {
  if constexpr (View::is_raw && sizeof(typename View::element_type) == 2) {
    using T = std::remove_const_t<typename View::element_type>;
    constexpr int row_bytes = (View::k_dim + View::v_dim) * 2, threads = 256;
    const std::size_t most = std::size_t(1) << 24, rows = (std::min)(memory.bytes / row_bytes, most);
    const index_t room = index_t(rows / Tile * Tile);
    if (!memory.data || room < 2 * Tile) return;
    T* const keys = static_cast<T*>(memory.data);
    T* const values = keys + std::size_t(room) * View::k_dim;
    row_maps maps;
    if (!map_rows(maps.k, keys, View::k_dim, {0, 0, View::k_dim, 1}, Tile)) return;
    if (!map_rows(maps.v, values, View::v_dim, {0, 0, View::v_dim, 1}, Tile)) return;
    maps.box_rows = Tile;
    gather_columns_entry<View, Tile, threads>
        <<<dim3(32, unsigned(q_heads)), threads, 0, stream>>>(view, argument.lines, room, keys, values);
    check(cudaGetLastError(), "launch of gather_columns");
    argument.columns = maps, argument.capacity = room;
  }
}

/// As dense_tiles, for rows of one query head that attend along its lines.
///
/// Stored slots are read in chunks of 32. A block lists the chunks that a slash line of any of its rows meets, and
/// packs four (or two) of them into a tile, whether they are neighbours or not. Their masks leave out the vertical
/// lines. The slots of vertical lines follow in tiles of their own, which only causality masks. A block with rows that
/// attend everything lists all chunks and masks by both kinds of lines, so it needs no other tiles.
/// The list lies in shared memory and has `Entries` entries. A longer list comes in pieces.
/// Slower (ms, 10 % of 128K, d 128, bf16, H200; this took 56.4 then, and takes 42.9 now): chunks that half of a block's
/// rows meet in tiles of their own 60.1; blocks that begin at different tiles 56.9.
template <class Rows, int Entries>
struct line_tiles {
  using problem_type = typename Rows::problem_type;
  using item_rows = typename Rows::item_rows;
  static constexpr int tile = Rows::tile, threads = Rows::listers, half_rows = Rows::block_rows / 2;
  static constexpr int chunk_slots = Rows::chunk_slots, tile_chunks = Rows::tile_chunks;
  static constexpr bool one_piece = false, gathers = true;
  using argument = line_argument;
  using meeting = typename Rows::listing;
  static constexpr int together =
      4;  // neighbouring chunks that a thread looks at: their distances lie in the same words

  static_assert(Entries % tile == 0 && Entries > threads * together + tile,
                "tessera: a list holds whole tiles and what a round of the threads adds");

  /// A chunk is an entry `number * 32 + flags`; a slot of a vertical line is an entry by itself.
  struct memory {
    alignas(16) std::uint32_t entries[Entries];
    block_scan<threads, index_t, meeting> scan;
    index_t next_chunk, last_chunk, next_column, last_column;  // what remains to be listed
  };
  static constexpr int memory_bytes = sizeof(memory);
  static constexpr std::uint32_t meets_half = 1,
                                 whole_for_half = 4,   // of the block's first 64 rows; doubled: of its other rows
      all_visible = 16;                                // the rule shows all rows all of it; where slots are positions
  static constexpr std::uint32_t no_chunk = 1u << 29;  // begins after every slot and meets nothing

  item_rows source;
  index_t first_row;

  __device__ line_tiles(const problem_type& p, const prefill_parts& parts, index_t item, const line_argument& said,
                        unsigned char* block_memory)
      : said_(said), lines_(said.lines), list_(*reinterpret_cast<memory*>(block_memory)) {
    const index_t group = p.q.heads / p.view.kv_heads;
    const index_t in_turn = item / parts.splits, part = item % parts.splits;
    const index_t blocks = parts.items / parts.splits / p.q.heads;
    // Head after head, so that blocks that run together read one head's K and V. A head's last rows, which see most, go
    // first.
    q_head_ = in_turn / blocks;
    if (lines_.order) q_head_ = lines_.order[q_head_];
    first_row = (blocks - 1 - in_turn % blocks) * Rows::block_rows;
    source = {0, q_head_ / group, q_head_, 1, 0, p.q.tokens, item};
    source.stored = (max)(p.view.length(0, source.head), 0);
    window_ = p.rule.sliding_window;
    dense_from_ = p.first_position[0] + p.q.tokens - (min)(lines_.dense_rows, p.q.tokens);
    slash_ = lines_.slash_of(q_head_), vertical_ = lines_.vertical_of(q_head_);
    const index_t oldest = Rows::position_of(p, source, first_row);
    const index_t newest = Rows::position_of(p, source, first_row + Rows::block_rows - 1);
    reads_all_ = newest >= dense_from_;
    const auto range = Rows::visible_range(p, source, oldest, newest);
    const auto share = [&](index_t begin, index_t end, index_t of) {
      return begin + index_t(offset_t((max)(end - begin, 0)) * of / parts.splits);
    };
    const index_t first_chunk = range.begin / chunk_slots, end_chunk = ceil_div(range.end, chunk_slots);
    index_t first_column = 0, end_column = 0;
    if (!reads_all_) {
      const index_t columns = lines_.column_counts[q_head_];
      const index_t* const slots = lines_.columns_of(q_head_);
      const auto column_from = [&](index_t slot) {
        return first_where_in_warp(columns, int(threadIdx.x % 32), [&](index_t i) { return slots[i] >= slot; });
      };
      first_column = range.begin > 0 ? column_from(range.begin) : 0, end_column = column_from(range.end);
    }
    if (lister() == 0) {
      list_.next_chunk = share(first_chunk, end_chunk, part),
      list_.last_chunk = share(first_chunk, end_chunk, part + 1);
      list_.next_column = share(first_column, end_column, part);
      list_.last_column = share(first_column, end_column, part + 1);
    }
    gathered_ = no_index;
    if (said_.columns.box_rows > 0 && end_column > 0) gathered_ = gathered_at<tile>(lines_, q_head_, said_.capacity);
  }

  __device__ bool has_more() const {
    return list_.next_chunk < list_.last_chunk || list_.next_column < list_.last_column;
  }

  __device__ index_t gather(const problem_type& p) {
    meeting::wait();  // what remains to be listed has been written
    const index_t last_chunk = list_.last_chunk, next_column = list_.next_column;
    index_t next_chunk = list_.next_chunk, listed = 0;
    for (; next_chunk < last_chunk && listed + threads * together <= Entries; next_chunk += threads * together) {
      const index_t chunk = next_chunk + lister() * together;
      const std::uint32_t flags = flags_from(p, chunk, last_chunk);
      const auto flags_at = [&](int i) { return flags >> i * 8 & 255; };
      index_t met = 0;
#pragma unroll
      for (int i = 0; i < together; ++i) met += flags_at(i) != 0 ? 1 : 0;
      index_t to = listed + list_.scan.exclusive_sum(met);
#pragma unroll
      for (int i = 0; i < together; ++i) {
        if (flags_at(i) != 0) list_.entries[to++] = std::uint32_t(chunk + i) * 32 | flags_at(i);
      }
      listed += list_.scan.total();
      meeting::wait();  // before the scan is used again
    }
    const index_t tiles = ceil_div(listed, tile_chunks), columns_at = tiles * tile_chunks;
    if (listed + lister() < columns_at) list_.entries[listed + lister()] = no_chunk;
    const index_t columns = next_chunk < last_chunk ? 0 : (min)(list_.last_column - next_column, Entries - columns_at);
    const index_t* const slots = lines_.columns_of(q_head_) + next_column;
    for (index_t i = lister(); i < columns; i += threads) {
      list_.entries[columns_at + i] = std::uint32_t(slots[i]);
    }
    meeting::wait();  // all threads have read what remained to be listed
    if (lister() == 0) list_.next_chunk = next_chunk, list_.next_column = next_column + columns;
    chunk_tiles_ = tiles, columns_ = columns, gathered_from_ = gathered_ + next_column;
    meeting::wait();  // the list is complete
    return tiles + ceil_div(columns, tile);
  }

  __device__ void ask(const problem_type& p, index_t row, index_t rows) {
    half_ = (row - first_row) / half_rows;
    oldest_ = Rows::position_of(p, source, row), newest_ = Rows::position_of(p, source, row + rows - 1);
  }

  __device__ index_t slot_of(index_t t, index_t row) const {
    if (t < chunk_tiles_) {
      return index_t(list_.entries[t * tile_chunks + row / chunk_slots] / 32) * chunk_slots + row % chunk_slots;
    }
    const index_t i = (t - chunk_tiles_) * tile + row;
    return i < columns_ ? index_t(list_.entries[chunk_tiles_ * tile_chunks + i]) : source.stored;
  }

  __device__ const row_maps& gathered() const { return said_.columns; }
  __device__ index_t gathered_row(index_t t) const {
    if (gathered_ == no_index || t < chunk_tiles_) return no_index;
    return gathered_from_ + (t - chunk_tiles_) * tile;
  }

  __device__ bool is_in_chunks(index_t t) const {
    return t < chunk_tiles_ && slot_of(t, tile - 1) < source.stored;  // chunks ascend
  }

  __device__ bool meets(const problem_type& p, index_t t) const {
    if (t < chunk_tiles_) {
      const chunks listed(list_, t * tile_chunks);
      std::uint32_t any = 0;
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) any |= listed.entries[c];
      return any & meets_half << half_;
    }
    return position_of(p, slot_of(t, 0)) <= newest_;
  }
  __device__ bool is_masked(const problem_type& p, index_t t) const {
    if (t < chunk_tiles_) {
      const chunks listed(list_, t * tile_chunks);
      std::uint32_t all = ~0u;
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) all &= listed.entries[c];
      return !(all & whole_for_half << half_);
    }
    const index_t last = slot_of(t, tile - 1);
    return window_ > 0 || last >= source.stored || position_of(p, last) > oldest_;
  }

  /// The bits of all chunks of a tile. Where slots are positions, the loads overlap.
  __device__ void visible_bits(const problem_type& p, index_t t, index_t query,
                               std::uint32_t (&bits)[tile_chunks]) const {
    if (t >= chunk_tiles_ || p.view.positions) {
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) bits[c] = seen_by(p, t, c, query);
      return;
    }
    const chunks listed(list_, t * tile_chunks);
    std::uint32_t vertical[tile_chunks], all = all_visible;
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) {
      const index_t chunk = index_t(listed.entries[c] / 32);
      const unsigned bit = unsigned(lines_.positions() - 1 - (max)(query - chunk * chunk_slots, 0));
      const std::uint32_t* const from = slash_ + bit / 32;
      bits[c] = __funnelshift_r(__ldg(from), __ldg(from + 1), bit % 32);
      vertical[c] = __ldg(vertical_ + (min)(chunk, lines_.words - 1));
      all &= listed.entries[c];
    }
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) bits[c] = reads_all_ ? bits[c] | vertical[c] : bits[c] & ~vertical[c];
    if (all != 0 && newest_ < dense_from_) return;
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) {
      const index_t first = index_t(listed.entries[c] / 32) * chunk_slots, behind = query - first;
      std::uint32_t visible = Rows::low_bits(source.stored - first) & Rows::low_bits(behind + 1);
      if (window_ > 0) visible &= ~Rows::low_bits(behind + 1 - window_);
      bits[c] = visible & (query >= dense_from_ ? ~0u : bits[c]);
    }
  }
  __device__ std::uint32_t visible_bits(const problem_type& p, index_t t, index_t c, index_t row) const {
    return seen_by(p, t, c, Rows::position_of(p, source, row));
  }

 private:
  __device__ std::uint32_t seen_by(const problem_type& p, index_t t, index_t c, index_t query) const {
    if (t < chunk_tiles_) return on_lines(p, query, index_t(list_.entries[t * tile_chunks + c] / 32));
    const auto is_seen = [&](index_t slot) {
      return slot < source.stored && p.rule.visible(query, position_of(p, slot));
    };
    if (window_ <= 0) {  // slots ascend: usually all of them are visible
      if (is_seen(slot_of(t, (c + 1) * chunk_slots - 1))) return ~0u;
      index_t seen = 0;
#pragma unroll 1
      for (index_t step = chunk_slots / 2; step > 0; step /= 2) {
        if (is_seen(slot_of(t, c * chunk_slots + seen + step - 1))) seen += step;
      }
      return Rows::low_bits(seen);
    }
    std::uint32_t visible = 0;
#pragma unroll 1
    for (index_t i = 0; i < chunk_slots; ++i) {
      const index_t slot = slot_of(t, c * chunk_slots + i);
      if (is_seen(slot)) visible |= 1u << i;
    }
    return visible;
  }

  /// This thread's number among the listing threads.
  __device__ static index_t lister() { return index_t(threadIdx.x % threads); }
  /// The entries of a tile of chunks.
  struct alignas(tile_chunks * 4) chunks {
    std::uint32_t entries[tile_chunks];
    __device__ chunks(const memory& list, index_t first)
        : chunks(*reinterpret_cast<const chunks*>(list.entries + first)) {}
  };
  __device__ index_t position_of(const problem_type& p, index_t slot) const {
    return p.view.position(0, source.head, slot);
  }

  /// The slots of a chunk that a row sees along its lines. Where slots are positions there is no branch, so the loads
  /// overlap.
  __device__ std::uint32_t on_lines(const problem_type& p, index_t query, index_t chunk) const {
    const index_t first = chunk * chunk_slots;
    const std::uint32_t visible = Rows::visible_slots(p, source, query, first);
    const auto bit_of = [&](index_t distance) { return lines_.positions() - 1 - distance; };
    std::uint32_t slash = 0;
    if (!p.view.positions) {
      // Distances fall as slots rise, so the bits are in reverse order. Neighbours stay side by side.
      const index_t bit = bit_of((max)(query - first, 0));
      slash = __funnelshift_r(slash_[bit / 32], slash_[bit / 32 + 1], bit % 32);
    } else {
      for (std::uint32_t left = visible; left != 0; left &= left - 1) {
        const index_t bit = bit_of(query - position_of(p, first + __ffs(int(left)) - 1));
        if (slash_[bit / 32] >> bit % 32 & 1) slash |= left & (0u - left);
      }
    }
    const std::uint32_t vertical = vertical_[(min)(chunk, lines_.words - 1)];
    const std::uint32_t lines = reads_all_ ? slash | vertical : slash & ~vertical;
    return visible & (query >= dense_from_ ? ~0u : lines);
  }

  /// Which of the block's rows meet each of the neighbouring chunks before `last`, in eight bits each; 0: none.
  __device__ std::uint32_t flags_from(const problem_type& p, index_t chunk, index_t last) const {
    std::uint32_t flags = 0;
    if (chunk >= last) return flags;
    if (p.view.positions) {
#pragma unroll 1
      for (int i = 0; i < together && chunk + i < last; ++i) flags |= flags_of(p, chunk + i) << i * 8;
      return flags;
    }
    std::uint32_t crossed = 0, hidden = 0;  // bit i: a vertical line crosses chunk i; the rule hides something of it
#pragma unroll
    for (int i = 0; i < together; ++i) {
      crossed |= __ldg(vertical_ + (min)(chunk + i, lines_.words - 1)) != 0 ? 1u << i : 0u;
    }
    const index_t first = chunk * chunk_slots;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t row = first_row + half * half_rows;
      if (row >= source.query_rows) continue;
      const index_t oldest = Rows::position_of(p, source, row),
                    newest = Rows::position_of(p, source, row + half_rows - 1);
      if (first > newest) hidden = ~0u;
      if (first > newest) continue;
      // Distances of the first chunk's slots begin here. Those of each later chunk begin 32 bits further on.
      const index_t begin = lines_.positions() - 1 - (newest - first), word = begin / 32, bit = begin % 32;
      constexpr int span = (half_rows + chunk_slots - 2) / 32 + 2;  // words that hold a chunk's distances
      std::uint32_t bits[span + together - 1];
#pragma unroll
      for (int i = 0; i < span + together - 1; ++i) bits[i] = __ldg(slash_ + (min)(word + i, lines_.words));
#pragma unroll
      for (int i = 0; i < together; ++i) {
        const index_t first_key = first + i * chunk_slots, last_key = (min)(first_key + chunk_slots, source.stored) - 1;
        const bool all_seen = last_key == first_key + chunk_slots - 1 && last_key <= oldest &&
                              (window_ <= 0 || newest - first_key < window_);
        if (!all_seen) hidden |= 1u << i;
        if (chunk + i >= last || first_key > newest || (window_ > 0 && last_key <= oldest - window_)) continue;
        const index_t end = bit + (newest - first_key) - (max)(0, oldest - last_key) + 1;
        std::uint32_t set = 0, missing = 0;
#pragma unroll
        for (int j = 0; j < span; ++j) {
          const std::uint32_t asked = Rows::low_bits(end - j * 32) & (j == 0 ? ~Rows::low_bits(bit) : ~0u);
          set |= bits[i + j] & asked, missing |= ~bits[i + j] & asked;
        }
        const bool is_crossed = crossed >> i & 1, all_dense = oldest >= dense_from_;
        const bool any = newest >= dense_from_ || set != 0 || (reads_all_ && is_crossed);
        const bool all = all_dense || (missing == 0 && (reads_all_ || !is_crossed));
        if (any) flags |= meets_half << half << i * 8;
        if (any && all && all_seen) flags |= whole_for_half << half << i * 8;
      }
    }
#pragma unroll
    for (int i = 0; i < together; ++i) {
      if (flags >> i * 8 & 255 && !(hidden >> i & 1)) flags |= all_visible << i * 8;
    }
    return flags;
  }
  /// The same for one chunk, whatever the slots' positions.
  __device__ std::uint32_t flags_of(const problem_type& p, index_t chunk) const {
    const index_t first = chunk * chunk_slots, last = (min)(first + chunk_slots, source.stored) - 1;
    const index_t first_key = position_of(p, first), last_key = position_of(p, last);
    const std::uint32_t vertical = vertical_[chunk];
    std::uint32_t flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t row = first_row + half * half_rows;
      if (row >= source.query_rows) continue;
      const index_t oldest = Rows::position_of(p, source, row),
                    newest = Rows::position_of(p, source, row + half_rows - 1);
      if (first_key > newest || (window_ > 0 && last_key <= oldest - window_)) continue;
      const bool all_seen =
          last == first + chunk_slots - 1 && last_key <= oldest && (window_ <= 0 || newest - first_key < window_);
      bool any = newest >= dense_from_, all = oldest >= dense_from_;
      if (!all) {
        const found on_slashes = distances((max)(0, oldest - last_key), newest - first_key);
        any = any || on_slashes.any || (reads_all_ && vertical != 0);
        all = on_slashes.all && (reads_all_ || vertical == 0);
      }
      if (any) flags |= meets_half << half;
      if (any && all && all_seen) flags |= whole_for_half << half;
    }
    return flags;
  }

  struct found {
    bool any, all;
  };
  /// Whether any and all of the distances [nearest, farthest] are slash lines.
  __device__ found distances(index_t nearest, index_t farthest) const {
    constexpr int few =
        (half_rows + chunk_slots - 2) / 32 + 2;  // words that hold a chunk's distances, where slots are positions
    const index_t begin = lines_.positions() - 1 - farthest, end = lines_.positions() - nearest;
    found result{false, true};
    const auto take = [&](index_t word, std::uint32_t bits) {
      const std::uint32_t asked = Rows::low_bits(end - word * 32) & ~Rows::low_bits(begin - word * 32),
                          set = bits & asked;
      result.any = result.any || set != 0;
      result.all = result.all && set == asked;
    };
    index_t word = begin / 32;
    std::uint32_t bits[few];
#pragma unroll
    for (int i = 0; i < few; ++i) bits[i] = slash_[(min)(word + i, lines_.words)];  // all loads are in flight together
#pragma unroll
    for (int i = 0; i < few; ++i) take(word + i, bits[i]);
    for (word += few; word * 32 < end && !(result.any && !result.all); ++word) take(word, slash_[word]);
    return result;
  }

  const line_argument& said_;
  const line_tables& lines_;
  memory& list_;
  const std::uint32_t *slash_, *vertical_;
  index_t q_head_, window_, dense_from_, gathered_;
  index_t chunk_tiles_ = 0, columns_ = 0, gathered_from_ = 0;  // what the piece's list consists of
  index_t half_ = 0, oldest_ = 0, newest_ = 0;                 // the present rows: their half, oldest and newest
  bool reads_all_;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
