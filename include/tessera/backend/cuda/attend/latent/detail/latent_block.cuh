// What a block of attention over latent rows attends, and the warps that copy its tiles to shared memory.
#pragma once

#include <climits>
#include <cstdint>

#include "../../../device/barrier.cuh"
#include "../../../device/kernel.cuh"
#include "../../../device/warp.cuh"
#include "../../../device/whole_numbers.cuh"
#include "../../attention_problems.cuh"
#include "../../detail/wide_products.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Outputs of parts of rows, which blocks merge. Part `place` has `block_rows` query rows.
struct latent_scratch {
  unsigned* arrived;  ///< [query blocks, rows]: counters, 0 between launches
  float* out;         ///< [2 * blocks, block_rows, v_dim]: sums that are not yet divided
  float2* state;      ///< [2 * blocks, block_rows]: maximum in base 2, and sum
  index_t first_lse;  ///< the problem's `lse` begins at this token
};

/// What a block attends, and how it comes to shared memory: the block's share of all rows' tiles, and the four
/// warps that copy. A block has 64 query rows (tokens times query heads), which stay in shared memory. Tiles of 64
/// tokens pass through a ring of two, in parts of 64 elements, rows of 128 bytes whose chunks are swizzled as
/// products require.
template <class View, class Out>
struct latent_block {
  using T = typename View::element_type;
  using problem_type = decode_problem<View, Out>;
  static constexpr int D = View::k_dim, Dv = View::v_dim, parts = D / 64;
  static constexpr int block_rows = 64, tile = 64, stages = 2, group_dims = Dv / 2;
  static constexpr int computers = 256, copiers = 128, threads = computers + copiers;
  static constexpr int computer_registers = 232, copier_registers = 40;
  static constexpr int part_bytes = 64 * 128, tile_bytes = parts * part_bytes;
  static_assert(D % 64 == 0 && Dv == 512 && block_rows == 64);

  /// What lies in shared memory behind queries, tiles and weights.
  struct notes {
    float references[block_rows], shrinks[block_rows];  ///< of the weights that a group tells the other
    float sums[2][block_rows];                          ///< of weights, by group
    index_t positions[stages][tile];
    int sight[stages][2];  ///< by half of a tile: what its rows see, of `sight_bits`
    std::uint64_t queries_filled, queries_freed, filled[stages], freed[stages];
    block_scan<threads, index_t> scan;
  };
  static constexpr int weights_at = (1 + stages) * tile_bytes, notes_at = weights_at + part_bytes;
  static constexpr int shared_bytes = notes_at + int(sizeof(notes));
  static constexpr index_t max_rows = stages * tile_bytes / 4;  ///< whose tile counts fit into the ring at first
  static_assert(shared_bytes <= shared_memory_of(90));

  /// Some row does not see all 64 tokens; some row does not see a token that is stored.
  enum sight_bits { masked = 1, hides = 2 };

  /// A run of tiles of one row, which a block attends.
  struct segment {
    index_t sequence, head, row, count;
    index_t first, last, tiles;  // of the row's tiles [0, tiles)
    index_t row_begin, row_end;  // in tiles of all rows
    const index_t* chosen;       // slots, or null
    __device__ bool whole() const { return first == 0 && last == tiles; }
  };

  const problem_type& p;
  const latent_scratch& scratch;
  unsigned char* memory;
  notes& shared;
  std::uint32_t begin_of_memory;
  index_t query_block, piece;  // the last query rows, which see most, begin first
  index_t group, query_rows, first_query;
  int used;
  // This block's share of all rows' tiles.
  index_t units = 0, pieces = 1, first_row = 0, first_row_begin = 0, begin = 0, end = 0;

  __device__ latent_block(const problem_type& problem, const latent_scratch& arrays, unsigned char* dynamic)
      : p(problem), scratch(arrays), memory(dynamic), shared(*reinterpret_cast<notes*>(dynamic + notes_at)) {
    begin_of_memory = shared_address(dynamic);
    query_block = index_t(gridDim.x - 1 - blockIdx.x), piece = index_t(blockIdx.y);
    group = p.q.heads / p.view.kv_heads;
    query_rows = p.q.tokens * group;
    first_query = query_block * block_rows;
    used = int((min)(index_t(block_rows), query_rows - first_query));
  }

  __device__ std::uint32_t queries() const { return begin_of_memory; }
  __device__ std::uint32_t stage_at(int stage) const {
    return begin_of_memory + std::uint32_t((1 + stage) * tile_bytes);
  }
  __device__ std::uint32_t weights() const { return begin_of_memory + std::uint32_t(weights_at); }
  /// Where 16 bytes of a row of a part lie.
  __device__ static std::uint32_t swizzled(int row, int chunk) {
    return std::uint32_t(row * 128 + ((chunk ^ row) & 7) * 16);
  }

  /// The same value, known to the compiler to be that of all lanes: products run on over branches that it decides.
  template <class V>
  __device__ __forceinline__ static V warp_uniform(V value) {
    return V(__shfl_sync(~0u, int(value), 0));
  }

  __device__ index_t position_of(index_t sequence, index_t query) const {
    return p.first_position[sequence] + query / group;
  }
  __device__ index_t count_of(index_t row) const {
    return p.chosen.indices ? p.chosen.count(row) : p.view.length(row / p.view.kv_heads, row % p.view.kv_heads);
  }
  /// Tiles of a row with a token that the last query row of this block sees, where slots are positions; otherwise all.
  __device__ index_t tiles_of(index_t row) const {
    index_t count = count_of(row);
    if (!p.view.positions && !p.chosen.indices) {
      count = (min)(count, position_of(row / p.view.kv_heads, first_query + used - 1) + 1);
    }
    return (max)(count + tile - 1, 0) / tile;
  }

  /// Cuts the tiles of all rows into even pieces, of which this block has one. The whole block calls it. A piece of one
  /// tile would be merged for longer than it is attended.
  __device__ void plan() {
    const index_t rows = p.view.sequences * p.view.kv_heads;
    auto* const ends = reinterpret_cast<index_t*>(memory + tile_bytes);
    scan_units<threads>(rows, ends, shared.scan, [&](index_t row) { return tiles_of(row); });
    units = ends[rows - 1];
    pieces = (max)(index_t(1), (min)(index_t(gridDim.y), (max)(rows, units / 2)));
    pieces = (min)(pieces, (max)(units, 1));
    if (units > 0 && piece < pieces) {
      const even_pieces cut(units, pieces);
      begin = warp_uniform(cut.begin(piece)), end = warp_uniform(cut.begin(piece + 1));
      first_row = warp_uniform(row_of_unit(ends, rows, begin));
      first_row_begin = warp_uniform(first_row > 0 ? ends[first_row - 1] : 0);
    }
    __syncthreads();  // the ring is free
  }

  template <class F>
  __device__ void for_each_segment(const F& of) const {
    index_t row = first_row, row_begin = first_row_begin, at = begin;
    while (at < end) {
      segment s;
      s.tiles = warp_uniform(tiles_of(row));
      s.row = row, s.row_begin = row_begin, s.row_end = row_begin + s.tiles;
      const index_t stop = (min)(end, s.row_end);
      if (stop > at) {
        s.sequence = row / p.view.kv_heads, s.head = row % p.view.kv_heads;
        s.count = count_of(row);
        s.chosen = p.chosen.indices ? p.chosen.row(row) : nullptr;
        s.first = at - row_begin, s.last = stop - row_begin;
        of(s);
        at = stop;
      }
      row_begin = s.row_end;
      ++row;
    }
  }

  /// Every lane arrives: racecheck does not count the arrival of one lane as ordering its whole warp.
  __device__ static void leave(std::uint64_t& barrier) {
    __syncwarp();
    arrive(shared_address(&barrier));
  }
  __device__ static void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // The copying warps.

  /// The rows of four tokens of a tile that this thread copies eighths of; null: zeros.
  struct token_rows {
    const T* rows[4];
  };
  /// A warp copies tokens warp * 4 + {0, 1, 2, 3} of each sixteen. Its lanes look one up each, and tell the others.
  __device__ token_rows find(const segment& s, index_t t) const {
    const int thread = int(threadIdx.x) - computers, lane = thread % 32;
    const index_t token = t * tile + thread / 32 * 4 + lane % 4 + lane / 4 % 4 * 16;
    const T* own = nullptr;
    if (token < s.count) own = p.view.key(s.sequence, s.head, s.chosen ? s.chosen[token] : token);
    token_rows found;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      found.rows[i] =
          reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(own), lane / 8 + i * 4));
    }
    return found;
  }
  /// Copies 64 rows to the parts at `to`.
  __device__ void copy(const token_rows& from, std::uint32_t to) const {
    const int thread = int(threadIdx.x) - computers, chunk = thread % 8;
    to += swizzled(thread / 8, chunk);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* row = (from.rows[i] ? from.rows[i] : p.q.data) + chunk * 8;
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        copy_async16(to + std::uint32_t(part * part_bytes + i * 16 * 128), row + part * 64, from.rows[i] != nullptr);
      }
    }
  }
  __device__ void copy_all() const {
    const int thread = int(threadIdx.x) - computers;
    index_t used_stages = 0, used_queries = 0;
    for_each_segment([&](const segment& s) {
      token_rows asked;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const index_t query = first_query + thread / 8 + i * 16;
        asked.rows[i] = nullptr;
        if (query < query_rows) asked.rows[i] = p.q.row(s.sequence, query / group, s.head * group + query % group);
      }
      wait_phase(shared_address(&shared.queries_freed), std::uint32_t(used_queries + 1) & 1);
      ++used_queries;
      copy(asked, queries());
      commit_copies();
      tell_copied(shared.queries_filled);
      token_rows next = find(s, s.first);
      const index_t oldest = position_of(s.sequence, first_query),
                    newest = position_of(s.sequence, first_query + used - 1);
#pragma unroll 1
      for (index_t t = s.first; t < s.last; ++t) {
        const int stage = int(used_stages % stages);
        const std::uint32_t turn = std::uint32_t(used_stages / stages) & 1;
        ++used_stages;
        index_t position = INT_MAX;
        if (thread < tile && t * tile + thread < s.count) {
          const index_t token = t * tile + thread;
          position = p.view.position(s.sequence, s.head, s.chosen ? s.chosen[token] : token);
        }
        wait_phase(shared_address(&shared.freed[stage]), turn ^ 1);
        copy(next, stage_at(stage));
        commit_copies();
        if (thread < tile) {
          shared.positions[stage][thread] = position;
          const bool hidden =
              position > oldest || (p.rule.sliding_window > 0 && newest - position >= p.rule.sliding_window);
          const bool any = __any_sync(~0u, hidden), stored = __any_sync(~0u, hidden && position != INT_MAX);
          if (thread % 32 == 0) shared.sight[stage][thread / 32] = (any ? masked : 0) | (stored ? hides : 0);
        }
        if (t + 1 < s.last) next = find(s, t + 1);  // while the copies run
        tell_copied(shared.filled[stage]);
      }
    });
  }
  /// A copying warp waits for its copies, and arrives: they are visible to products then.
  __device__ static void tell_copied(std::uint64_t& barrier) {
    wait_copies<0>();
    fence_async();
    leave(barrier);
  }
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
