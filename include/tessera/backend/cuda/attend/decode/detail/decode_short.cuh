// Decode attention over short rows on the GPU: a cluster of blocks reads each row and merges its parts in shared
// memory.
#pragma once

#include <algorithm>

#include "../../../device/cluster.cuh"
#include "../../../device/tuning.cuh"
#include "decode_kernel.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

inline constexpr int max_of_cluster = 8;  // blocks; every device with clusters runs clusters of this size

/// The blocks of a cluster read one row, equally many tiles each. Each block sends every other block that block's share
/// of the outputs, and finishes its own share. No block reads the lengths of other rows, and no part goes through
/// global memory.
template <class View, class Out>
struct decode_short : decode_kernel<View, Out> {
  using base = decode_kernel<View, Out>;
  using base::base;
  using base::lane, base::memory, base::p, base::threads, base::tokens, base::used, base::warp;
  using typename base::queries_type, typename base::segment, typename base::span_positions, typename base::staging_type,
      typename base::state_type;
  static constexpr int D = View::k_dim, Dv = View::v_dim, stages = base::config::stages, fours = Dv / 4;

  /// The parts that a block receives from all blocks of its cluster.
  struct memory_type {
    float4 outs[rows_per_block<View> * fours + max_of_cluster];  // of its share, block by block
    float2 states[max_of_cluster][rows_per_block<View>];
    arrivals counter;
  };

  /// How many tiles beyond the ring are prefetched at once: without this a warp would reach them late.
  static constexpr int ahead = 2;

  __device__ void read_row(const segment& now, state_type& state) const {
    if (now.first_tile >= now.last_tile) return;
    staging_type staging(shared_address(memory + warp * warp_bytes<View>(base::config::tuning)));
    const auto tokens_from = [&](index_t t) { return base::token_of(t); };
    if (now.source.chosen) base::prefetch_indices(now.source.chosen, now.first_tile, now.last_tile, now.source.count);
    staging.find(p.view, now.source, now.first_tile, now.last_tile, tokens_from, lane);
    index_t later[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const index_t token = base::token_of(now.first_tile + stages + i) + lane % tokens;
      const bool there = now.first_tile + stages + i < now.last_tile && token < now.source.count;
      later[i] = there ? staging_type::slot_of(now.source, token) : no_index;
    }
    queries_type asked;
    base::load_queries(now.source, asked);
    const span_positions ends_at = base::positions_of(now);
    staging.begin(p.view, now.source, now.first_tile, now.last_tile, tokens_from, lane);
#pragma unroll
    for (const index_t slot : later) prefetch_row(now.source, slot);
    base::read_tiles(now, ends_at, asked, staging, state);
  }
  /// Prefetches a slot's key and value; lanes of one token share the work.
  __device__ void prefetch_row(const decode_row& at, index_t slot) const {
    constexpr int unit_bytes = int(sizeof(typename View::stored_type));
    if (slot == no_index) return;
    const auto ask = [](const auto* row, int bytes) {
      for (int i = 0; i < bytes; i += 128) prefetch_line(reinterpret_cast<const unsigned char*>(row) + i);
    };
    if (tokens == 32 || lane < tokens) ask(p.view.key(at.sequence, at.head, slot), View::k_units * unit_bytes);
    if (tokens == 32 || lane >= tokens) ask(p.view.value(at.sequence, at.head, slot), View::v_units * unit_bytes);
  }

  /// `shift`: log2 of the number of blocks in the cluster. The caller has already called `begin` of the counter.
  __device__ void run(int shift, memory_type& shared) const {
    const int blocks = 1 << shift, rank = int(blockIdx.x) & (blocks - 1);
    const index_t row = index_t(blockIdx.x) >> shift, sequence = small_quotient(row, p.view.kv_heads);
    segment now{};
    now.row = row;
    now.source = {sequence, row - sequence * p.view.kv_heads, base::count_of(p, row),
                  p.chosen.indices ? p.chosen.row(row) : nullptr};
    now.row_end = base::tiles_of(now.source.count);
    now.first_tile = now.row_end * rank >> shift, now.last_tile = now.row_end * (rank + 1) >> shift;
    {
      state_type state;
      read_row(now, state);
      state.store(base::outs_of(warp), base::states_of(warp), used, lane);
    }
    __syncthreads();
    cluster_wait();  // every block's counter has begun
    if (shift == 0) return base::merge_warps(now, true);
    // The row's outputs, four at a time, go to the blocks in turn: each block has every `blocks`-th.
    const int items = used * fours, most = (items + blocks - 1) >> shift, share = (items - rank + blocks - 1) >> shift;
    if (threadIdx.x == 0)
      shared.counter.expect(std::uint32_t(blocks * (share * int(sizeof(float4)) + used * int(sizeof(float2)))));
    base::for_each_four([&](int r, int d) {
      const typename base::merged_four own = base::merge_warps_four(r, d);
      const int item = r * fours + d / 4;
      send(shared.outs + rank * most + (item >> shift), item & (blocks - 1), own.x, shared.counter);
      for (int block = 0; d == 0 && block < blocks; ++block)
        send(&shared.states[rank][r], block, make_float2(own.top, own.sum), shared.counter);
    });
    shared.counter.wait();
    for (int i = int(threadIdx.x); i < share; i += threads) {
      const int item = (i << shift) + rank, r = item / fours, d = item % fours * 4;
      const typename base::merged_four all = base::template merge_four<max_of_cluster>(
          blocks, [&](int part) { return shared.states[part][r]; },
          [&](int part) { return shared.outs[part * most + i]; });
      base::write(now.source, r, d, all.x, base::finish(now.source, r, all.top, all.sum, d == 0));
    }
  }
};

template <class View, class Out>
__global__ void __launch_bounds__(decode_short<View, Out>::threads, 1)
    decode_short_entry(const __grid_constant__ decode_problem<View, Out> problem, int shift) {
  using kernel = decode_short<View, Out>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ typename kernel::memory_type shared;
  if (threadIdx.x == 0) shared.counter.begin();
  __syncthreads();
  cluster_arrive_relaxed();
  touch_parameter(problem);
  const decode_scratch none{};
  const kernel block(problem, none, memory, nullptr);
  wait_for_earlier();
  let_later_begin();
  block.run(shift, shared);
}

/// The host's part: which clusters read short rows.
template <class View, class Out>
class decode_clusters {
 public:
  explicit decode_clusters(const device_info& device) {
    if (!entry_.overlaps()) return;  // no clusters
    const decode_tuning tuning = decode_tuning_for<View>(entry_.architecture());
    tile_ = tuning.warps * tuning.tokens;
    shared_bytes_ = decode_shared_bytes<View>(tuning);
    if (!entry_.allow_shared(std::size_t(shared_bytes_), device)) return;
    threads_ = tuning.warps * 32;
    resident_[0] = device.multiprocessors;
    for (int shift = 1; shift < shifts; ++shift) {
      resident_[shift] = entry_.resident_clusters({.blocks = dim3(1u << shift),
                                                   .threads = dim3(unsigned(threads_)),
                                                   .shared_bytes = std::size_t(shared_bytes_),
                                                   .cluster = 1u << shift});
    }
  }

  /// Returns log2 of how many blocks read a row of `tokens` tokens (0: unknown) if there are `rows` rows, or -1 if even
  /// pieces take less time. Clusters save a merge through global memory, 1 to 2 us, but may leave multiprocessors idle.
  /// With 64 of 132 at work, clusters of 8 and 4 win up to 3 tiles a block and clusters of 2 up to 8. With 128 at work,
  /// clusters win for any length (H200, CUDA 13.0).
  int shift_of(offset_t rows, offset_t tokens) const {
    if (threads_ == 0 || tokens <= 0) return -1;
    const offset_t tiles = ceil_div(tokens, offset_t(tile_)), all = resident_[0];
    for (int shift = shifts - 1; shift >= 0; --shift) {
      if (rows > resident_[shift] || tiles <= (1 << shift >> 1)) continue;
      const offset_t of_block = (tiles + (1 << shift) - 1) >> shift,
                     idle = (std::max)(all - (rows << shift), offset_t(0));
      return of_block * idle <= all * (shift > 1 ? 2 : 4) ? shift : -1;
    }
    return -1;
  }

  void run(const decode_problem<View, Out>& problem, index_t rows, index_t query_blocks, int shift,
           cudaStream_t stream) const {
    entry_.launch({.blocks = dim3(unsigned(rows) << shift, unsigned(query_blocks)),
                   .threads = dim3(unsigned(threads_)),
                   .shared_bytes = std::size_t(shared_bytes_),
                   .cluster = 1u << shift,
                   .overlapping = true},
                  stream, "launch of decode attention over short rows", problem, shift);
  }

 private:
  static constexpr int shifts = 4;
  device_kernel<decode_problem<View, Out>, int> entry_{decode_short_entry<View, Out>};
  int threads_ = 0, tile_ = 0, shared_bytes_ = 0;
  int resident_[shifts] = {};  // clusters that can run at the same time
};

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
