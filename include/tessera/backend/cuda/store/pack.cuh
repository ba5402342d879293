// Keeping chosen tokens on the GPU: a gather of K and V rows and their columns, to new memory or in place.
#pragma once

#include <algorithm>

#include "../../../core/engine/move_problem.hpp"
#include "../../../core/selection.hpp"
#include "../device/alignment.cuh"
#include "../device/barrier.cuh"
#include "../device/memory.cuh"
#include "../device/tuning.cuh"
#include "../device/whole_numbers.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// The newest tokens of a sequence as a selection: what a sliding layer keeps, and what stays whole when a prompt has
// been packed.

namespace detail {

/// Writes the newest slots of each kv_head to slots [kv_heads, limit], and their number to counts [kv_heads].
template <int Threads>
__global__ void __launch_bounds__(Threads)
    newest_slots_entry(const index_t* lengths, index_t limit, index_t* slots, index_t* counts) {
  const index_t h = blockIdx.x, stored = lengths[h], count = (min)(stored, limit);
  for (index_t i = threadIdx.x; i < count; i += Threads) slots[h * limit + i] = stored - count + i;
  if (threadIdx.x == 0) counts[h] = count;
}

}  // namespace detail

/// The newest slots of every kv_head of one sequence, at most `capacity`. They lie in this object's memory until the
/// next call.
class newest_slots {
 public:
  newest_slots(index_t kv_heads, index_t capacity)
      : heads_(kv_heads), slots_(std::size_t(kv_heads) * std::size_t(capacity)), counts_(std::size_t(kv_heads)) {}

  /// The newest slots of each kv_head, at most `limit`.
  selection_view selection(const index_t* lengths, index_t limit, cudaStream_t stream) const {
    detail::newest_slots_entry<256>
        <<<unsigned(heads_), 256, 0, stream>>>(lengths, limit, slots_.data(), counts_.data());
    check(cudaGetLastError(), "launch of newest_slots");
    return {slots_.data(), counts_.data(), nullptr, limit};
  }

 private:
  index_t heads_;
  device_buffer<index_t> slots_, counts_;
};

using tessera::pack_problem;  // core/engine/move_problem.hpp: the same on both backends
using tessera::slot_column;

namespace detail {

inline constexpr int pack_threads = 256;
inline constexpr int max_pack_rows = 4096;

/// Scratch of the in-place gather: tickets, and for every tile a mark that its rows have been read.
struct pack_scratch {
  unsigned* ticket;
  unsigned* finished;
  unsigned* epoch;  // the mark of a run; earlier runs' marks differ, so none is cleared
  unsigned* read;   // [tiles]
  offset_t tiles;
};

/// How rows move: in chunks of 16 bytes, or element by element where they do not lie side by side.
template <class Stored>
struct moved_rows {
  using unit = Stored;
  using chunk = uint4;
  static constexpr bool in_blocks = false;
  static constexpr int per_chunk = 16 / int(sizeof(Stored));
  static constexpr int units(int stored) { return stored; }
  template <class Pointer>
  __device__ static Pointer begin(Pointer row) {
    return row;
  }
};
/// Rows of blocks, which lie side by side, in words as long as a block is aligned to.
template <element_block Block>
struct moved_rows<Block> {
  using unit = std::conditional_t<alignof(Block) % 4 == 0, unsigned, unsigned short>;
  using chunk = unit;
  static constexpr bool in_blocks = true;
  static constexpr int per_chunk = 1;
  static constexpr int units(int blocks) { return blocks * int(sizeof(Block) / sizeof(unit)); }
  __device__ static const unit* begin(const Block* row) { return reinterpret_cast<const unit*>(row); }
  __device__ static unit* begin(Block* row) { return reinterpret_cast<unit*>(row); }
};

/// Gathers tile by tile. A tile is a range of consecutive target slots of one (sequence, head). Where rows go towards
/// an end, slots are counted from there backwards, which turns moves up into moves down.
///
/// In place: sources ascend and never lie below their target. So only tiles up to t read what tile t overwrites. Each
/// tile first reads all of its rows and sets its mark. It then waits for the marks of the (at most two) earlier tiles
/// whose sources lie under its targets, and only then writes. Reading never waits, so waits do not chain. Tickets hand
/// out tiles in order. So a tile that another one waits for is already running, on any number of resident blocks.
template <class From, class To, bool Aligned, bool InPlace>
struct pack_kernel {
  static_assert(check_device_rows<From>());
  using rows = moved_rows<typename From::encoding_type::stored_type>;
  using T = typename rows::unit;  // moved without conversion
  using chunk_type = typename rows::chunk;
  static constexpr bool scaled = From::encoding_type::scaled && !static_scales<typename From::encoding_type>;
  static constexpr int D = rows::units(From::k_units), Dv = rows::units(From::v_units), per_chunk = rows::per_chunk;
  static constexpr int k_chunks = D / per_chunk, chunks = k_chunks + Dv / per_chunk;  // of a token
  static constexpr int max_tile = 2048 / chunks;
  static constexpr int tile = max_tile >= 128  ? 128
                              : max_tile >= 64 ? 64
                              : max_tile >= 32 ? 32
                              : max_tile >= 16 ? 16
                                               : 8;
  static constexpr int thread_chunks = (tile * chunks + pack_threads - 1) / pack_threads;
  static_assert(tile * chunks <= thread_chunks * pack_threads && thread_chunks <= 8,
                "tessera: a tile fits the registers of a block");
  static_assert(D % per_chunk == 0 && Dv % per_chunk == 0);

  struct shared {
    const T *from_k[tile], *from_v[tile];
    T *to_k[tile], *to_v[tile];
    index_t ends[max_pack_rows];  // inclusive prefix sum of tiles by row
    block_scan<pack_threads, index_t> scan;
    index_t tile_id, next_ticket;
    unsigned epoch;
    bool moves;
  };

  __device__ static chunk_type load(const T* from, offset_t stride) {
    if constexpr (rows::in_blocks) {
      return __ldcg(from);
    } else if constexpr (Aligned) {
      return __ldcg(reinterpret_cast<const uint4*>(from));  // not from L1, which may hold stale rows
    } else {
      uint4 chunk;
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          word[i] = bits_as<std::uint32_t>(__ldcg(reinterpret_cast<const float*>(from) + i * stride));
        } else if constexpr (sizeof(T) == 1) {
          const auto* bytes = reinterpret_cast<const unsigned char*>(from);
          word[i] = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) word[i] |= std::uint32_t(__ldcg(bytes + (i * 4 + j) * stride)) << (j * 8);
        } else {
          const auto* halves = reinterpret_cast<const unsigned short*>(from);
          word[i] = __ldcg(halves + i * 2 * stride) | std::uint32_t(__ldcg(halves + (i * 2 + 1) * stride)) << 16;
        }
      }
      chunk.x = word[0], chunk.y = word[1], chunk.z = word[2], chunk.w = word[3];
      return chunk;
    }
  }
  __device__ static void store(T* to, offset_t stride, const chunk_type& chunk) {
    if constexpr (rows::in_blocks) {
      *to = chunk;
    } else if constexpr (Aligned) {
      *reinterpret_cast<uint4*>(to) = chunk;
    } else {
      const std::uint32_t word[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          reinterpret_cast<float*>(to)[i * stride] = bits_as<float>(word[i]);
        } else if constexpr (sizeof(T) == 1) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            reinterpret_cast<unsigned char*>(to)[(i * 4 + j) * stride] = static_cast<unsigned char>(word[i] >> (j * 8));
          }
        } else {
          auto* halves = reinterpret_cast<unsigned short*>(to);
          halves[i * 2 * stride] = static_cast<unsigned short>(word[i]);
          halves[(i * 2 + 1) * stride] = static_cast<unsigned short>(word[i] >> 16);
        }
      }
    }
  }

  __device__ static void run(const pack_problem<From, To>& p, const pack_scratch& scratch) {
    __shared__ shared s;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const index_t heads = p.source.kv_heads, rows = p.source.sequences * heads;
    if (p.lengths && blockIdx.x == 0) {
      for (index_t row = thread; row < rows; row += pack_threads) {
        p.lengths[row / heads * p.target.length_strides.sequence + row % heads * p.target.length_strides.head] =
            (max)(p.chosen.count(row), 0);
      }
    }
    if (InPlace && thread == 0) {
      s.epoch = load_acquire(scratch.epoch) + 1;
      s.next_ticket = index_t(atomicAdd(scratch.ticket, 1u));
    }
    scan_units(rows, s.ends, s.scan,
               [&](index_t row) { return index_t((max)(p.chosen.count(row), 0) + tile - 1) / tile; });
    const index_t total = s.ends[rows - 1];
    if (InPlace) TESSERA_ASSUME(total <= scratch.tiles);  // no row keeps more than the capacity

    for (index_t turn = blockIdx.x;; turn += index_t(gridDim.x)) {
      const index_t id = InPlace ? s.next_ticket : turn;
      if (id >= total) break;
      const index_t row = row_of_unit(s.ends, rows, id);
      const index_t b = row / heads, h = row % heads, first = (id - (row ? s.ends[row - 1] : 0)) * tile;
      const index_t* slots = p.chosen.row(row);
      const index_t count = p.chosen.count(row), used = (min)(index_t(tile), count - first);
      const bool backwards = p.ends != nullptr;
      const index_t last_slot = backwards ? p.ends[b] - 1 : 0;
      const auto counted = [&](index_t slot) { return backwards ? last_slot - slot : slot; };
      const auto source_of = [&](index_t i) { return counted(__ldg(slots + (backwards ? count - 1 - i : i))); };
      const index_t to = counted(first + thread);

      index_t position = 0, segment = 0;
      float score = 0, k_scale = 1, v_scale = 1;
      if (thread < used) {
        const index_t slot = counted(source_of(first + thread));
        s.from_k[thread] = rows::begin(p.source.key(b, h, slot));
        s.from_v[thread] = rows::begin(p.source.value(b, h, slot));
        s.to_k[thread] = rows::begin(p.target.key(b, h, to));
        s.to_v[thread] = rows::begin(p.target.value(b, h, to));
        if (p.positions.data) position = p.source.position(b, h, slot);
        if (p.scores.data) score = p.source_scores.entry(b, h, heads, slot);
        if (p.segments.data) segment = p.source_segments.entry(b, h, heads, slot);
        if constexpr (scaled) k_scale = p.source.key_scale(b, h, slot), v_scale = p.source.value_scale(b, h, slot);
        // Sources ascend strictly. So if the last one stays where it is, all before it stay too.
        if (InPlace && thread == used - 1) s.moves = slot != to;
      }
      __syncthreads();  // also: every thread has read next_ticket
      const bool moves = !InPlace || s.moves;

      chunk_type chunk[thread_chunks];
      if (moves) {
#pragma unroll
        for (int i = 0; i < thread_chunks; ++i) {
          const int index = i * pack_threads + thread, token = index / chunks, part = index % chunks;
          if (token < used) {
            chunk[i] =
                part < k_chunks
                    ? load(s.from_k[token] + part * per_chunk * (Aligned ? 1 : p.source.k_strides.dim),
                           p.source.k_strides.dim)
                    : load(s.from_v[token] + (part - k_chunks) * per_chunk * (Aligned ? 1 : p.source.v_strides.dim),
                           p.source.v_strides.dim);
          }
        }
      }
      if constexpr (InPlace) {
        index_t earlier = 0;
        if (warp == 0) {
          if (lane == 0) s.next_ticket = index_t(atomicAdd(scratch.ticket, 1u));
          if (moves) {
            earlier = first_where_in_warp(first + used, lane, [&](index_t i) { return source_of(i) >= first; }) / tile;
          }
        }
        __threadfence();  // this thread's reads are done before the mark can be seen
        __syncthreads();
        if (thread == 0) store_release(scratch.read + id, s.epoch);
        if (warp == 0 && moves) {
          // At most `tile` sources lie in [first, first + used), so they belong to at most two tiles.
          const index_t mine = first / tile, other = earlier + lane;
          if (lane < 2 && other < mine) {
            while (load_acquire(scratch.read + id - mine + other) != s.epoch) __nanosleep(64);
          }
        }
        __syncthreads();
      }
      if (moves) {
#pragma unroll
        for (int i = 0; i < thread_chunks; ++i) {
          const int index = i * pack_threads + thread, token = index / chunks, part = index % chunks;
          if (token < used) {
            if (part < k_chunks) {
              store(s.to_k[token] + part * per_chunk * (Aligned ? 1 : p.target.k_strides.dim), p.target.k_strides.dim,
                    chunk[i]);
            } else {
              store(s.to_v[token] + (part - k_chunks) * per_chunk * (Aligned ? 1 : p.target.v_strides.dim),
                    p.target.v_strides.dim, chunk[i]);
            }
          }
        }
      }
      if (thread < used) {
        if (p.positions.data) p.positions.entry(b, h, heads, to) = position;
        if (p.scores.data) p.scores.entry(b, h, heads, to) = score;
        if (p.segments.data) p.segments.entry(b, h, heads, to) = segment;
        if constexpr (scaled) {
          const offset_t at = p.target.scales.index(p.target.table.locate(b, h, to), h);
          p.target.scales.k[at] = k_scale, p.target.scales.v[at] = v_scale;
        }
      }
      __syncthreads();  // the addresses in shared memory may be overwritten
    }
    if (InPlace && thread == 0) {
      __threadfence();
      if (atomicAdd(scratch.finished, 1u) == gridDim.x - 1) {  // the last block resets the scratch
        *scratch.ticket = 0;
        *scratch.finished = 0;
        store_release(scratch.epoch, s.epoch);
      }
    }
  }
};

template <class From, class To, bool Aligned, bool InPlace>
__global__ void __launch_bounds__(pack_threads, 4)
    pack_entry(const __grid_constant__ pack_problem<From, To> problem, pack_scratch scratch) {
  pack_kernel<From, To, Aligned, InPlace>::run(problem, scratch);
}

}  // namespace detail

/// Copies the chosen slots of every (sequence, kv_head) to slots 0, 1, 2, ... of another view, or of the same one;
/// with `ends`, to the slots before an end, behind which no chosen slot may lie (the host does not see it). Rows are
/// copied as they are stored, with their scales, positions, scores and segments. Either view may have page tables.
///
/// In place (`InPlace`: the target has the source's memory), blocks may run in any order, because the selection
/// ascends. In-place runs that share a workspace must follow one another on one stream. `prepare` the workspace once.
/// Counts are read on the device, so a captured launch can be replayed while they change.
/// Cost     reads and writes each chosen row once, 16 bytes at a time where rows are 16-byte aligned with dim stride 1.
template <class From, class To, bool InPlace = false>
class pack {
  static_assert(std::is_same_v<typename From::encoding_type, typename To::encoding_type> && From::k_dim == To::k_dim &&
                    From::v_dim == To::v_dim,
                "tessera: pack copies rows between views of one encoding and head dims");

 public:
  /// `capacity`: an upper bound of the tokens that one (sequence, kv_head) keeps.
  pack(index_t sequences, index_t kv_heads, index_t capacity, const device_info& device) : rows_(sequences * kv_heads) {
    require(rows_ <= detail::max_pack_rows, "sequences * kv_heads", rows_,
            "at most " + std::to_string(detail::max_pack_rows), "split the batch");
    tiles_ = offset_t(rows_) * ceil_div((std::max)(capacity, 0), kernel::tile);
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, detail::pack_entry<From, To, true, InPlace>,
                                                        detail::pack_threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    blocks_ = int(std::clamp<offset_t>(tiles_, 1, (std::max)(1, resident) * device.multiprocessors));
  }

  std::size_t workspace_bytes() const { return InPlace ? (4 + std::size_t(tiles_)) * sizeof(unsigned) : 0; }

  /// Clears the workspace. Called once, before the first run.
  void prepare(void* workspace, cudaStream_t stream) const {
    if (InPlace) check(cudaMemsetAsync(workspace, 0, workspace_bytes(), stream), "cudaMemsetAsync(pack workspace)");
  }

  void run(const pack_problem<From, To>& problem, void* workspace, cudaStream_t stream) const {
    const index_t rows = problem.source.sequences * problem.source.kv_heads;
    require(rows >= 0 && rows <= rows_, "sequences * kv_heads", rows, "at most " + std::to_string(rows_),
            "construct pack for the largest batch");
    require(!InPlace || (problem.source.k == problem.target.k && problem.source.v == problem.target.v),
            "memory of target", "another", "that of source", "leave InPlace false for other memory");
    problem.check();
    if (rows == 0) return;
    auto* words = static_cast<unsigned*>(workspace);
    const detail::pack_scratch scratch =
        InPlace ? detail::pack_scratch{words, words + 1, words + 2, words + 4, tiles_} : detail::pack_scratch{};
    if constexpr (kernel::rows::in_blocks) {
      const offset_t strides[] = {problem.source.k_strides.dim, problem.source.v_strides.dim,
                                  problem.target.k_strides.dim, problem.target.v_strides.dim};
      for (const offset_t stride : strides)
        require(stride == 1, "dim stride of rows of blocks", stride, "1", "store the blocks of a row side by side");
      detail::pack_entry<From, To, true, InPlace><<<blocks_, detail::pack_threads, 0, stream>>>(problem, scratch);
      check(cudaGetLastError(), "pack launch");
      return;
    }
    const bool aligned = rows_on_16_bytes(problem.source.k, problem.source.k_strides) &&
                         rows_on_16_bytes(problem.source.v, problem.source.v_strides) &&
                         rows_on_16_bytes(problem.target.k, problem.target.k_strides) &&
                         rows_on_16_bytes(problem.target.v, problem.target.v_strides);
    if (aligned) {
      detail::pack_entry<From, To, true, InPlace><<<blocks_, detail::pack_threads, 0, stream>>>(problem, scratch);
    } else {
      detail::pack_entry<From, To, false, InPlace><<<blocks_, detail::pack_threads, 0, stream>>>(problem, scratch);
    }
    check(cudaGetLastError(), "pack launch");
  }

 private:
  using kernel = detail::pack_kernel<From, To, true, InPlace>;
  index_t rows_;
  offset_t tiles_;
  int blocks_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
