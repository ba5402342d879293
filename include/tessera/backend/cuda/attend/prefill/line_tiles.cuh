// The tiles of attention along lines: what slash lines meet of what is stored, and the slots of vertical lines.
#pragma once

#include "../../choose/lines/line_tables.cuh"
#include "dense_tiles.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// As dense_tiles, for rows of one query head that attend along its lines.
///
/// What is stored is looked at in chunks of 32 slots. A block lists those that a slash line of any of its rows meets, and packs
/// four (or two) of them to a tile, neighbours or not; their masks leave out the vertical lines. The slots of vertical lines
/// follow, packed to tiles of their own, which only causality masks. A block with rows that attend everything lists all chunks
/// and masks by both kinds of lines, so that it needs no other tiles.
/// The list lies in shared memory, `Entries` of it: a longer one comes in pieces.
/// Lost (ms, 10 % of 128K, d 128, bf16, H200; this takes 56.4): chunks that half of a block's rows meet in tiles of their own 60.1;
/// blocks that begin at different tiles 56.9. Without copies it would take 43.0.
template <class Rows, int Entries>
struct line_tiles {
  using problem_type = typename Rows::problem_type;
  using place = typename Rows::place;
  static constexpr int tile = Rows::tile, threads = Rows::threads, half_rows = Rows::block_rows / 2;
  static constexpr int chunk_slots = Rows::chunk_slots, tile_chunks = Rows::tile_chunks;
  static constexpr bool one_piece = false;
  using argument = line_tables;
  using meeting = typename Rows::meeting;

  static_assert(Entries % tile == 0 && Entries > threads + tile,
                "tessera: a list holds whole tiles and what a round of the block's threads adds");

  /// A chunk is an entry `number * 16 + flags`; a slot of a vertical line is an entry by itself.
  struct memory {
    alignas(16) std::uint32_t entries[Entries];
    block_scan<threads, index_t, meeting> scan;
    // What is still to be listed, and of what the piece's list consists: registers are scarcer than time here.
    index_t first_chunk, next_chunk, last_chunk, first_column, next_column, last_column;
    index_t chunk_tiles, columns_at, columns;
  };
  static constexpr int memory_bytes = sizeof(memory);
  static constexpr std::uint32_t meets_half = 1,
                                 whole_for_half = 4;   // of the block's first 64 rows; twice that: the others
  static constexpr std::uint32_t no_chunk = 1u << 29;  // begins behind every slot, meets nothing

  place at;
  index_t first_row;

  __device__ line_tiles(const problem_type& p, const prefill_parts& parts, const line_tables& tables,
                        unsigned char* block_memory)
      : lines_(tables), list_(*reinterpret_cast<memory*>(block_memory)) {
    const index_t group = p.q.heads / p.view.kv_heads;
    const index_t item = index_t(blockIdx.x) / parts.splits, part = index_t(blockIdx.x) % parts.splits;
    const index_t blocks = index_t(gridDim.x) / parts.splits / p.q.heads;
    // Head after head, so that what runs at a time reads one head's K and V; their last rows, which see most, go first.
    q_head_ = item / blocks;
    if (lines_.order) q_head_ = lines_.order[q_head_];
    first_row = (blocks - 1 - item % blocks) * Rows::block_rows;
    at = {0, q_head_ / group, q_head_, 1, 0, p.q.tokens};
    at.stored = max(p.view.length(0, at.head), 0);
    window_ = p.rule.sliding_window;
    dense_from_ = p.first_position[0] + p.q.tokens - min(lines_.dense_rows, p.q.tokens);
    slash_ = lines_.slash_of(q_head_), vertical_ = lines_.vertical_of(q_head_);
    const index_t oldest = Rows::position_of(p, at, first_row);
    const index_t newest = Rows::position_of(p, at, first_row + Rows::block_rows - 1);
    reads_all_ = newest >= dense_from_;
    const auto range = Rows::seen(p, at, oldest, newest);
    const auto share = [&](index_t begin, index_t end, index_t of) {
      return begin + index_t(offset_t(max(end - begin, 0)) * of / parts.splits);
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
    if (threadIdx.x == 0) {
      list_.first_chunk = list_.next_chunk = share(first_chunk, end_chunk, part);
      list_.last_chunk = share(first_chunk, end_chunk, part + 1);
      list_.first_column = list_.next_column = share(first_column, end_column, part);
      list_.last_column = share(first_column, end_column, part + 1);
    }
  }

  __device__ void rewind(const problem_type&) {
    if (threadIdx.x == 0) list_.next_chunk = list_.first_chunk, list_.next_column = list_.first_column;
  }

  __device__ bool has_more() const {
    return list_.next_chunk < list_.last_chunk || list_.next_column < list_.last_column;
  }

  __device__ index_t gather(const problem_type& p) {
    meeting::wait();  // what is still to be listed is there
    const index_t last_chunk = list_.last_chunk, next_column = list_.next_column;
    index_t next_chunk = list_.next_chunk, listed = 0;
    for (; next_chunk < last_chunk && listed + threads <= Entries; next_chunk += threads) {
      const index_t chunk = next_chunk + index_t(threadIdx.x);
      const std::uint32_t flags = chunk < last_chunk ? flags_of(p, chunk) : 0;
      const index_t before = list_.scan.before(flags != 0 ? 1 : 0);
      if (flags != 0) list_.entries[listed + before] = std::uint32_t(chunk) * 16 | flags;
      listed += list_.scan.total();
      meeting::wait();  // before the scan is used again
    }
    const index_t tiles = ceil_div(listed, tile_chunks), columns_at = tiles * tile_chunks;
    if (listed + index_t(threadIdx.x) < columns_at) list_.entries[listed + threadIdx.x] = no_chunk;
    const index_t columns = next_chunk < last_chunk ? 0 : min(list_.last_column - next_column, Entries - columns_at);
    const index_t* const slots = lines_.columns_of(q_head_) + next_column;
    for (index_t i = index_t(threadIdx.x); i < columns; i += threads) {
      list_.entries[columns_at + i] = std::uint32_t(slots[i]);
    }
    meeting::wait();  // all know what was still to be listed
    if (threadIdx.x == 0) {
      list_.next_chunk = next_chunk, list_.next_column = next_column + columns;
      list_.chunk_tiles = tiles, list_.columns_at = columns_at, list_.columns = columns;
    }
    meeting::wait();  // the list is there
    return tiles + ceil_div(columns, tile);
  }

  __device__ void ask(const problem_type& p, index_t row, index_t rows) {
    half_ = (row - first_row) / half_rows;
    oldest_ = Rows::position_of(p, at, row), newest_ = Rows::position_of(p, at, row + rows - 1);
  }

  __device__ index_t slot_of(index_t t, index_t row) const {
    if (t < list_.chunk_tiles) {
      return index_t(list_.entries[t * tile_chunks + row / chunk_slots] / 16) * chunk_slots + row % chunk_slots;
    }
    const index_t i = (t - list_.chunk_tiles) * tile + row;
    return i < list_.columns ? index_t(list_.entries[list_.columns_at + i]) : at.stored;
  }

  __device__ bool is_in_chunks(index_t t) const {
    return t < list_.chunk_tiles && slot_of(t, tile - 1) < at.stored;  // chunks ascend
  }

  __device__ bool meets(const problem_type& p, index_t t) const {
    if (t < list_.chunk_tiles) {
      const chunks listed(list_, t * tile_chunks);
      std::uint32_t any = 0;
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) any |= listed.entries[c];
      return any & meets_half << half_;
    }
    return position_of(p, slot_of(t, 0)) <= newest_;
  }
  __device__ bool is_masked(const problem_type& p, index_t t) const {
    if (t < list_.chunk_tiles) {
      const chunks listed(list_, t * tile_chunks);
      std::uint32_t all = ~0u;
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) all &= listed.entries[c];
      return !(all & whole_for_half << half_);
    }
    const index_t last = slot_of(t, tile - 1);
    return window_ > 0 || last >= at.stored || position_of(p, last) > oldest_;
  }

  /// Of all chunks of a tile. Where slots are positions the loads are under way together.
  __device__ void seen(const problem_type& p, index_t t, index_t row, std::uint32_t (&bits)[tile_chunks]) const {
    const index_t query = Rows::position_of(p, at, row);
    if (t >= list_.chunk_tiles || p.view.positions) {
#pragma unroll
      for (int c = 0; c < tile_chunks; ++c) bits[c] = seen(p, t, c, row);
      return;
    }
    const chunks listed(list_, t * tile_chunks);
    std::uint32_t slash[tile_chunks], vertical[tile_chunks];
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) {
      const index_t chunk = index_t(listed.entries[c] / 16);
      const index_t bit = lines_.positions() - 1 - max(query - chunk * chunk_slots, 0);
      slash[c] = __funnelshift_r(__ldg(slash_ + bit / 32), __ldg(slash_ + bit / 32 + 1), bit % 32);
      vertical[c] = __ldg(vertical_ + min(chunk, lines_.words - 1));
    }
#pragma unroll
    for (int c = 0; c < tile_chunks; ++c) {
      const index_t first = index_t(listed.entries[c] / 16) * chunk_slots, behind = query - first;
      std::uint32_t visible = Rows::low_bits(at.stored - first) & Rows::low_bits(behind + 1);
      if (window_ > 0) visible &= ~Rows::low_bits(behind + 1 - window_);
      const std::uint32_t lines = reads_all_ ? slash[c] | vertical[c] : slash[c] & ~vertical[c];
      bits[c] = visible & (query >= dense_from_ ? ~0u : lines);
    }
  }
  __device__ std::uint32_t seen(const problem_type& p, index_t t, index_t c, index_t row) const {
    const index_t query = Rows::position_of(p, at, row);
    if (t < list_.chunk_tiles) {
      return on_lines(p, query, index_t(list_.entries[t * tile_chunks + c] / 16));
    }
    const auto is_seen = [&](index_t slot) { return slot < at.stored && p.rule.visible(query, position_of(p, slot)); };
    if (window_ <= 0) {  // slots ascend: mostly all of them are seen, or none
      if (is_seen(slot_of(t, (c + 1) * chunk_slots - 1))) return ~0u;
      if (!is_seen(slot_of(t, c * chunk_slots))) return 0;
    }
    std::uint32_t visible = 0;
    for (index_t i = 0; i < chunk_slots; ++i) {
      const index_t slot = slot_of(t, c * chunk_slots + i);
      if (is_seen(slot)) visible |= 1u << i;
    }
    return visible;
  }

 private:
  /// The entries of a tile of chunks.
  struct alignas(tile_chunks * 4) chunks {
    std::uint32_t entries[tile_chunks];
    __device__ chunks(const memory& list, index_t first)
        : chunks(*reinterpret_cast<const chunks*>(list.entries + first)) {}
  };
  __device__ index_t position_of(const problem_type& p, index_t slot) const {
    return p.view.position(0, at.head, slot);
  }

  /// Which slots of a chunk a row sees along its lines. Where slots are positions no branch keeps loads from being under way together.
  __device__ std::uint32_t on_lines(const problem_type& p, index_t query, index_t chunk) const {
    const index_t first = chunk * chunk_slots;
    const std::uint32_t visible = Rows::visible_slots(p, at, query, first);
    const auto bit_of = [&](index_t distance) { return lines_.positions() - 1 - distance; };
    std::uint32_t slash = 0;
    if (!p.view.positions) {
      // Distances fall as slots rise, so the bits stand the other way round: neighbours lie side by side.
      const index_t bit = bit_of(max(query - first, 0));
      slash = __funnelshift_r(slash_[bit / 32], slash_[bit / 32 + 1], bit % 32);
    } else {
      for (std::uint32_t left = visible; left != 0; left &= left - 1) {
        const index_t bit = bit_of(query - position_of(p, first + __ffs(int(left)) - 1));
        if (slash_[bit / 32] >> bit % 32 & 1) slash |= left & (0u - left);
      }
    }
    const std::uint32_t vertical = vertical_[min(chunk, lines_.words - 1)];
    const std::uint32_t lines = reads_all_ ? slash | vertical : slash & ~vertical;
    return visible & (query >= dense_from_ ? ~0u : lines);
  }

  /// What the block's rows have to do with a chunk; 0: nothing.
  __device__ std::uint32_t flags_of(const problem_type& p, index_t chunk) const {
    const index_t first = chunk * chunk_slots, last = min(first + chunk_slots, at.stored) - 1;
    const index_t first_key = position_of(p, first), last_key = position_of(p, last);
    const std::uint32_t vertical = vertical_[chunk];
    std::uint32_t flags = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const index_t row = first_row + half * half_rows;
      if (row >= at.query_rows) continue;
      const index_t oldest = Rows::position_of(p, at, row), newest = Rows::position_of(p, at, row + half_rows - 1);
      if (first_key > newest || (window_ > 0 && last_key <= oldest - window_)) continue;
      const bool all_visible =
          last == first + chunk_slots - 1 && last_key <= oldest && (window_ <= 0 || newest - first_key < window_);
      bool any = newest >= dense_from_, all = oldest >= dense_from_;
      if (!all) {
        const found on_slashes = distances(max(0, oldest - last_key), newest - first_key);
        any = any || on_slashes.any || (reads_all_ && vertical != 0);
        all = on_slashes.all && (reads_all_ || vertical == 0);
      }
      if (any) flags |= meets_half << half;
      if (any && all && all_visible) flags |= whole_for_half << half;
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
    for (int i = 0; i < few; ++i) bits[i] = slash_[min(word + i, lines_.words)];  // under way together
#pragma unroll
    for (int i = 0; i < few; ++i) take(word + i, bits[i]);
    for (word += few; word * 32 < end && !(result.any && !result.all); ++word) take(word, slash_[word]);
    return result;
  }

  const line_tables& lines_;
  memory& list_;
  const std::uint32_t *slash_, *vertical_;
  index_t q_head_, window_, dense_from_;
  index_t half_ = 0, oldest_ = 0, newest_ = 0;  // who asks
  bool reads_all_;
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
