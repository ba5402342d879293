// The sizes and the shared memory of the Hopper prefill kernel: a ring of tiles, and what those who fetch tell those
// who compute.
#pragma once

#include "../../device/barrier.cuh"
#include "prefill_rows.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
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
  using meeting = numbered_barrier<3, threads>;  // of both roles, each at its own place of the code
  using listing = numbered_barrier<4, copiers>;  // of the warps that fetch
  // Of the 168 that each thread begins with. Lost (ms, 16K causal, H200, CUDA 13.0; this takes 3.75): 72 and 216 5.28.
  static constexpr int copier_registers = 56, computer_registers = 224;
  static constexpr int resident = 1, stages = 3, group_rows = 64, half_bytes = tile * 128;  // of 64 elements a token
  static constexpr int k_bytes = D / 64 * half_bytes, v_bytes = Dv / 64 * half_bytes;
  static_assert(block_rows == tile && copiers == block_rows,
                "tessera: queries are laid out as a tile of keys, and each thread that fetches looks at one row");
  /// What the rows see of a tile: of each group, and bits by chunk of slots and row where something is hidden.
  struct alignas(16) sight {
    // by_rows: written by threads, not in boxes. queries, end: no tile, but the next item's queries, or none for now;
    // last: no more.
    enum : std::uint32_t { met = 1, masked = 2, by_rows = 4, queries = 8, end = 16, last = 32 };
    std::uint32_t of_group[2], bits[base::tile_chunks][block_rows];
  };

  /// Where 16-byte chunk `chunk` of row `row` lies in a tensor of rows.
  __device__ static std::uint32_t swizzled(int row, int chunk) {
    return std::uint32_t(chunk / 8 * half_bytes + row * 128 + ((chunk ^ row) & 7) * 16);
  }
};

/// Where a tile lies in the ring, and the parity of its barriers.
template <int Stages>
struct ring_place {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) stage = 0, parity ^= 1;
  }
};

/// Keys, values, sights and barriers of each stage, and notes. A tile's sight comes and goes with its keys. The queries
/// of an item come as keys without values, in front of its tiles.
template <class Shape>
struct prefill_ring {
  static constexpr int stages = Shape::stages, stage_bytes = Shape::k_bytes + Shape::v_bytes;
  using sight = typename Shape::sight;
  /// Whose rows the tiles behind queries are for.
  struct work {
    typename Shape::place at;
    index_t first_row;
  };
  /// Items that are fetched before it is known whether one is spoilt: that one, those whose queries lie in the ring,
  /// and one more.
  static constexpr int works = 8;
  static_assert(stages + 2 <= works && works <= 32);
  struct notes {
    work of[works];   ///< by number of the item
    unsigned spoilt;  ///< which of them met a value that a row must not see
    index_t next[2];  ///< the items behind, by turns
    bool waits[2];    ///< whether spoilt ones go first
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
  /// By one thread, in front of a barrier of the block.
  __device__ void begin() const {
    for (int i = 0; i < stages; ++i) {
      init_barrier(keys_filled(i), 2 * Shape::copiers), init_barrier(keys_freed(i), Shape::computers);
      init_barrier(values_filled(i), Shape::copiers), init_barrier(values_freed(i), Shape::computers);
    }
    publish_barriers();  // the copy engine counts bytes at them
    noted().spoilt = 0;
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
