// The warps of the Hopper prefill kernel that fetch tiles, by boxes of the copy engine where possible.
#pragma once

#include "../../../device/barrier.cuh"
#include "prefill_rows.cuh"
#include "tensor_map.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The sizes and the shared memory of the Hopper prefill kernel: a ring of tiles, and what the fetching warps pass to
// the computing warps.

namespace detail {

/// The sizes of the Hopper kernel: two groups of four warps that compute, 64 query rows each, and four warps that
/// fetch.
template <class View, class Out>
struct prefill_hopper_shape : prefill_rows<View, Out, 8, 1, 128, 4> {
  using base = prefill_rows<View, Out, 8, 1, 128, 4>;
  using base::block_rows, base::D, base::Dv, base::tile;
  static constexpr int copying_warps = 4, copiers = copying_warps * 32, computers = base::threads;
  static constexpr int threads = computers + copiers, listers = copiers;
  // Barriers 1 and 2 are the groups' turns.
  using meeting = numbered_barrier<3, threads>;  // of both roles; each role has its own line of code
  using listing = numbered_barrier<4, copiers>;  // of the warps that fetch
  // Registers, of the 168 that each thread begins with. Slower: 72 and 216 took 5.28 ms where this takes 3.75 (16K
  // causal, H200, CUDA 13.0).
  static constexpr int copier_registers = 56, computer_registers = 224;
  static constexpr int resident = 1, stages = 3, group_rows = 64, half_bytes = tile * 128;  // of 64 elements a token
  static constexpr int k_bytes = D / 64 * half_bytes, v_bytes = Dv / 64 * half_bytes;
  static_assert(block_rows == tile && copiers == block_rows,
                "tessera: queries are laid out as a tile of keys, and each thread that fetches looks at one row");
  /// What the rows see of a tile: flags for each group, and, where something is hidden, bits by chunk of slots and row.
  struct alignas(16) sight {
    // by_rows: threads copied the tile row by row, without boxes. queries, end: this is no tile, but the next item's
    // queries (queries) or, for now, nothing (end). last: nothing more follows.
    enum : std::uint32_t { met = 1, masked = 2, by_rows = 4, queries = 8, end = 16, last = 32 };
    std::uint32_t of_group[2], bits[base::tile_chunks][block_rows];
  };

  /// Where 16-byte chunk `chunk` of row `row` lies in a tensor of rows.
  __device__ static std::uint32_t swizzled(int row, int chunk) {
    return std::uint32_t(chunk / 8 * half_bytes + row * 128 + ((chunk ^ row) & 7) * 16);
  }
};

/// The stage of a tile in the ring, and the parity of its barriers.
template <int Stages>
struct ring_place {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

/// Keys, values, sights and barriers of each stage, and notes. A tile's sight has the same lifetime as its keys. An
/// item's queries are fetched before its tiles, as keys without values.
template <class Shape>
struct prefill_ring {
  static constexpr int stages = Shape::stages, stage_bytes = Shape::k_bytes + Shape::v_bytes;
  using sight = typename Shape::sight;
  /// The item whose tiles follow the queries: its rows.
  struct work {
    typename Shape::item_rows source;
    index_t first_row;
  };
  /// How many items may be fetched before it is known whether one is spoilt: that item, those whose queries lie in the
  /// ring, and one more.
  static constexpr int works = 8;
  static_assert(stages + 2 <= works && works <= 32);
  struct notes {
    work items[works];  ///< by the item's number
    unsigned spoilt;    ///< bits of the items that met a value that a row must not see
    index_t next[2];    ///< the following items, in alternation
    bool waits[2];      ///< whether spoilt items go first
  };
  static constexpr int barriers_at = stages * (stage_bytes + int(sizeof(sight))),
                       notes_at = barriers_at + stages * 4 * 8;
  static constexpr int bytes = (notes_at + int(sizeof(notes)) + 15) / 16 * 16;

  unsigned char* memory;
  std::uint32_t shared;

  __device__ explicit prefill_ring(unsigned char* of_block) : memory(of_block), shared(shared_address(of_block)) {}
  __device__ std::uint32_t keys(int stage) const { return shared + std::uint32_t(stage * Shape::k_bytes); }
  __device__ std::uint32_t values(int stage) const {
    return shared + std::uint32_t(stages * Shape::k_bytes + stage * Shape::v_bytes);
  }
  __device__ sight& sight_of(int stage) const { return reinterpret_cast<sight*>(memory + stages * stage_bytes)[stage]; }
  /// Behind the barriers: static memory would cost 1 KiB of alignment.
  __device__ notes& noted() const { return *reinterpret_cast<notes*>(memory + notes_at); }
  __device__ std::uint32_t keys_filled(int stage) const { return shared + std::uint32_t(barriers_at + stage * 8); }
  __device__ std::uint32_t keys_freed(int stage) const { return keys_filled(stage) + stages * 8; }
  __device__ std::uint32_t values_filled(int stage) const { return keys_filled(stage) + stages * 16; }
  __device__ std::uint32_t values_freed(int stage) const { return keys_filled(stage) + stages * 24; }
  /// One thread calls it, before a barrier of the block.
  __device__ void begin() const {
    for (int i = 0; i < stages; ++i) {
      init_barrier(keys_filled(i), 2 * Shape::copiers), init_barrier(keys_freed(i), Shape::computers);
      init_barrier(values_filled(i), Shape::copiers), init_barrier(values_freed(i), Shape::computers);
    }
    publish_barriers();  // the copy engine counts bytes at these barriers
    noted().spoilt = 0;
  }
};

/// Fetches queries, keys and values, and writes which slots the rows see.
template <class View, class Out>
struct prefill_fetch : prefill_hopper_shape<View, Out> {
  using shape = prefill_hopper_shape<View, Out>;
  using base = typename shape::base;
  using shape::computers, shape::copying_warps, shape::D, shape::Dv, shape::group_rows, shape::half_bytes;
  using shape::stages, shape::swizzled, shape::tile;
  using typename base::problem_type;
  using typename shape::listing, typename shape::meeting, typename shape::sight;
  using ring = prefill_ring<shape>;
  using ring_place = detail::ring_place<stages>;

  /// Fetches the block's items, one after another. Where one is spoilt, it waits for the items in flight and fetches
  /// the spoilt ones once more before it continues.
  template <class Tiles>
  __device__ static void fetch_items(const problem_type& p, const prefill_parts& parts, const row_maps& maps,
                                     const typename Tiles::argument& argument, const ring& stored,
                                     unsigned char* list) {
    const bool leads = int(threadIdx.x) == computers;
    auto& notes = stored.noted();
    ring_place at;
    int number = 0;
    index_t item = index_t(blockIdx.x);
    bool waits = false;
    std::uint32_t again = 0;  // the items of the notes that remain to be fetched again
#pragma unroll 1
    while (true) {
      const bool last = item >= parts.items, fresh = again == 0;
      if (fresh && (last || waits)) {
        tell<Tiles>(p, nullptr, stored, last ? sight::end | sight::last : sight::end, 0, at);
        meeting::wait();
        again = notes.spoilt, waits = false;
        if (again == 0) return;
        continue;
      }
      index_t next = item + index_t(gridDim.x);
      if (fresh && parts.taken && leads) next = index_t(gridDim.x) + atomicAdd(parts.taken, 1);
      {
        Tiles tiles(p, parts, fresh ? item : notes.items[__ffs(int(again)) - 1].source.item, argument, list);
        for (bool begun = false; !begun || (!Tiles::one_piece && tiles.has_more()); begun = true) {
          const index_t count = tiles.gather(p);
          if (!begun) tell(p, &tiles, stored, sight::queries, fresh ? number % ring::works : no_index, at);
          fetch(p, maps, tiles, stored, count, at);
        }
      }
      if (fresh && leads) {
        notes.next[number % 2] = next;
        notes.waits[number % 2] = atomicOr(&notes.spoilt, 0u) != 0;
      }
      listing::wait();  // all threads have finished with the list
      if (fresh) {
        item = notes.next[number % 2], waits = notes.waits[number % 2], ++number;
      } else if (again &= again - 1; again == 0) {
        tell<Tiles>(p, nullptr, stored, last ? sight::end | sight::last : sight::end, 0, at);
        meeting::wait();
        if (last) return;
        if (leads) notes.spoilt = 0;
      }
    }
  }

 private:
  /// Fetches the queries of an item and notes the item at `number`; no_index: it is noted already. Without `tiles`,
  /// signals that there is no item.
  template <class Tiles>
  __device__ static void tell(const problem_type& p, const Tiles* tiles, const ring& stored, std::uint32_t what,
                              index_t number, ring_place& at) {
    const int own = int(threadIdx.x) - computers, warp = own / 32, stage = at.stage;
    wait_phase(stored.keys_freed(stage), at.parity ^ 1);
    if (tiles) {
      const int first = warp * base::warp_share;
      base::template copy_queries<base::warp_share>(
          p, tiles->source, tiles->first_row + first, int(threadIdx.x) % 32,
          [&](int r, int chunk) { return stored.keys(stage) + swizzled(first + r, chunk); });
    }
    arrive_after_copies(stored.keys_filled(stage));
    if (own == 0) {
      sight& seen = stored.sight_of(stage);
      seen.of_group[0] = seen.of_group[1] = what;
      if (tiles && number != no_index) stored.noted().items[number] = {tiles->source, tiles->first_row};
    }
    arrive(stored.keys_filled(stage));
    wait_phase(stored.values_freed(stage), at.parity ^ 1);
    arrive(stored.values_filled(stage));
    at.advance();
  }

  struct box_place {
    offset_t row;
    index_t head;
    offset_t outer;
  };
  /// Fetches the tiles of a piece, and writes what each row sees of them. Each thread examines one row.
  /// A tile's work here must end within the time of its products, or the products wait: waiting was a quarter of their
  /// time. Slower (ms, attention along 10 % of 128K, d 128, bf16, H200, CUDA 13.0; this takes 42.9): one warp requests
  /// all boxes 59.1; a tile's facts looked up only when its stage is free, and more than once, 47.6.
  template <class Tiles>
  __device__ static void fetch(const problem_type& p, const row_maps& maps, Tiles& tiles, const ring& stored,
                               index_t count, ring_place& at) {
    const int own = int(threadIdx.x) - computers, warp = own / 32;
    const index_t own_group = tiles.first_row + own / group_rows * group_rows;
    const index_t query = base::position_of(p, tiles.source, tiles.first_row + own);
    const int stored_boxes = maps.box_rows > 0 ? tile / maps.box_rows : 0;
    tiles.ask(p, own_group, group_rows);
    const auto box_of = [&](index_t t, int row) {
      const slot_address from = p.view.table.locate(tiles.source.sequence, tiles.source.head, tiles.slot_of(t, row));
      return box_place{from.row, tiles.source.head * maps.head_step, from.outer * maps.outer_step};
    };
    const auto arrive_filled = [](std::uint32_t barrier) {
      if constexpr (View::is_raw)
        arrive_after_copies(barrier);
      else
        arrive(barrier);  // decoded rows were stored by threads, not copied asynchronously
    };
#pragma unroll 1
    for (index_t t = 0; t < count; ++t, at.advance()) {
      const int stage = at.stage;
      int lane = threadIdx.x % 32;
      asm volatile("" : "+r"(lane));  // keeps the compiler from holding addresses of rows in registers
      // All facts of the tile are computed before its stage is free.
      index_t gathered = no_index;
      if constexpr (Tiles::gathers) gathered = tiles.gathered_row(t);
      const bool in_boxes = gathered != no_index || (stored_boxes > 0 && tiles.is_in_chunks(t));
      const int boxes = gathered != no_index ? 1 : stored_boxes;
      box_place first_box{gathered, 0, 0};
      if (in_boxes && gathered == no_index && warp < boxes) first_box = box_of(t, warp * maps.box_rows);
      const bool met = own_group < tiles.source.query_rows && tiles.meets(p, t), masked = met && tiles.is_masked(p, t);
      std::uint32_t bits[base::tile_chunks] = {};
      if (masked) tiles.visible_bits(p, t, query, bits);

      // Copies a tile's keys or values. The first lane of each warp requests the boxes: lanes would do so one after
      // another.
      const auto copy_boxes = [&](const CUtensorMap row_maps::* tensor, std::uint32_t to, int dim,
                                  std::uint32_t barrier) {
        const CUtensorMap* map = &(maps.*tensor);
        if constexpr (Tiles::gathers) map = gathered != no_index ? &(tiles.gathered().*tensor) : map;
        const int rows = boxes == 1 ? tile : maps.box_rows;
        if (threadIdx.x % 32 != 0 || warp >= boxes) {
          arrive(barrier);
          return;
        }
        const int mine = (boxes + copying_warps - 1 - warp) / copying_warps;
        arrive_expecting(barrier, std::uint32_t(mine * dim * 2 * rows));
        box_place from = first_box;
#pragma unroll 1
        for (int i = warp; true;) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (half * 64 >= dim) continue;
            copy_box(to + std::uint32_t(half * half_bytes + i * rows * 128), *map, half * 64, from.row, from.head,
                     from.outer, barrier);
          }
          i += copying_warps;
          if (i >= boxes) break;
          from = box_of(t, i * rows);
        }
      };
      wait_phase(stored.keys_freed(stage), at.parity ^ 1);
      index_t slot = 0;
      if (in_boxes) {
        copy_boxes(&row_maps::k, stored.keys(stage), D, stored.keys_filled(stage));
      } else {
        slot = tiles.slot_of(t, warp * base::warp_share + lane);
        base::copy_keys(p, tiles.source, slot, warp, lane,
                        [&](int token, int chunk) { return stored.keys(stage) + swizzled(token, chunk); });
        arrive_filled(stored.keys_filled(stage));
      }
      sight& seen = stored.sight_of(stage);
      if (own % group_rows == 0) {
        seen.of_group[own / group_rows] =
            (met ? sight::met : 0) | (masked ? sight::masked : 0) | (in_boxes ? 0 : sight::by_rows);
      }
      if (masked) {
#pragma unroll
        for (int c = 0; c < base::tile_chunks; ++c) seen.bits[c][own] = bits[c];
      }
      arrive(stored.keys_filled(stage));
      wait_phase(stored.values_freed(stage), at.parity ^ 1);
      if (in_boxes) {
        copy_boxes(&row_maps::v, stored.values(stage), Dv, stored.values_filled(stage));
      } else {
        base::copy_values(p, tiles.source, slot, warp, lane,
                          [&](int token, int chunk) { return stored.values(stage) + swizzled(token, chunk); });
        arrive_filled(stored.values_filled(stage));
      }
    }
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
