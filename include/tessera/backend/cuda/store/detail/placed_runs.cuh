// Rows in runs on the device.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/plan/capacity.hpp"
#include "../../../../core/plan/layer_extent.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../layout/runs.hpp"
#include "../pack.cuh"
#include "../step_table.cuh"
#include "run_pool.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Copies blocks of rows that page tables name.

namespace detail {

/// Copies the block that entry i of a row of `from` names to the block that entry i of the same row of `to` names.
/// blockIdx: x is i, y the row, z a plane, whose `row_bytes` are those of a block. `tokens`: the length of each row,
/// stored in blocks of `page` tokens; null: every block of the grid is copied.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    copy_blocks_entry(const __grid_constant__ plane_list list, const index_t* tokens, index_t page, const index_t* from,
                      const index_t* to, index_t stride) {
  const offset_t index = offset_t(blockIdx.y) * stride + blockIdx.x;
  if (tokens && index_t(blockIdx.x) >= ceil_div(tokens[blockIdx.y], page)) return;
  const plane p = list.planes[blockIdx.z];
  const offset_t block_words = p.row_bytes / 4;
  const auto* source = reinterpret_cast<const std::uint32_t*>(p.data) + from[index] * block_words;
  auto* target = reinterpret_cast<std::uint32_t*>(p.data) + to[index] * block_words;
  for (offset_t i = threadIdx.x; i < block_words; i += Threads) target[i] = source[i];
}

}  // namespace detail

/// A pool of `all` blocks of `rows` rows each, and copies within it: see `copy_blocks_entry`.
template <class Layout>
struct block_pool {
  using encoding_type = typename Layout::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  stored_type *k, *v;
  float* scales;  ///< of rows that are scaled: those of K, then those of V
  offset_t all, rows;

  /// Copies the blocks that `rows_of_table` rows of `from` name, at most `blocks` each, to those that `to` names.
  void copy(index_t rows_of_table, index_t blocks, const index_t* tokens, index_t page, const index_t* from,
            const index_t* to, index_t stride, cudaStream_t stream) const {
    if (blocks == 0) return;
    detail::plane_list list;
    const auto plane_of = [&](auto* data, offset_t elements) {
      return plane{reinterpret_cast<std::byte*>(data), index_t(rows * elements * offset_t(sizeof(*data)))};
    };
    list.planes[0] = plane_of(k, Layout::k_dim), list.planes[1] = plane_of(v, Layout::v_dim);
    if constexpr (encoding_type::scaled)
      list.planes[2] = plane_of(scales, 1), list.planes[3] = plane_of(scales + all * rows, 1);
    const dim3 grid{unsigned(blocks), unsigned(rows_of_table), encoding_type::scaled ? 4u : 2u};
    detail::copy_blocks_entry<128><<<grid, 128, 0, stream>>>(list, tokens, page, from, to, stride);
    check(cudaGetLastError(), "launch of copy_blocks");
  }
};

/// Where a cache's rows lie; specialised by placement. An entry is layer * sequences + id. Changes are first planned on
/// the host: call `plan`, then any number of `plan_room` and `plan_keep`. Then call `commit_room` or `keep` for the
/// same entries in the same order, or `abandon`. Members:
///   rows_for(placement, entries, kv_heads, tokens)   rows of a pool that suffices
///   constructor                         (placement, layers, sequences, kv_heads, tokens, rows)
///   view(owner), batch_view(layer, batch)   rows without lengths and positions
///   column()                            what a step table has to gather
///   plan_room(entry, held, tokens), commit_room(entry, lengths, held, stream)
///   plan_keep(entry, held, kept), keep(...)   only the chosen slots stay
///   shrank(entry, gained, held)         rows were dropped; the placement may release their room
///   dropped(entry, gained)              rows were dropped; room that was committed before stays
///   plan_copy(to, held), commit_copy(from, to, lengths, held, stream)   an empty entry gets what `from` stores,
///                                       with these bounds and lengths
///   commit_empty(entry, lengths, held, stream)   the same without rows: what `plan_copy` planned is laid out
///   grew(entry, tokens), clear(entry), bytes(entry)
///   upper_bound(peaks), available()     the most that a new sequence takes; what is neither owned nor promised
/// `held` is a stored_tokens: bounds of all heads together, and of each.
template <class Layout, class Placement = typename Layout::placement_type>
class placed_rows {
  static_assert(sizeof(Placement) == 0,
                "tessera: the device's store does not know this placement; include the header that specialises "
                "cuda::placed_rows for it");
};

namespace detail {

/// Bytes of the planes of a row format: K, V and, where rows are scaled, one scale each.
template <class Layout>
host_vector<index_t> planes_of() {
  using encoding = typename Layout::encoding_type;
  host_vector<index_t> bytes{index_t(Layout::k_dim * sizeof(typename encoding::stored_type)),
                             index_t(Layout::v_dim * sizeof(typename encoding::stored_type))};
  if (encoding::scaled) bytes.insert(bytes.end(), 2, index_t(sizeof(float)));
  return bytes;
}

}  // namespace detail

/// Rows in one pool. An entry's heads lie in one run. Each head has free rows behind its tokens.
template <class Layout>
class placed_rows<Layout, runs> {
 public:
  using encoding_type = typename Layout::encoding_type;
  using stored_type = typename encoding_type::stored_type;
  using view_type = kv_view<view_element<encoding_type>, Layout::k_dim, ragged, Layout::v_dim>;

  static constexpr bool keeps_in_place = false;
  static offset_t rows_for(const runs&, index_t entries, index_t kv_heads, index_t tokens) {
    return run_pool::rows_for(entries, kv_heads, tokens);
  }

  /// No head of an entry ever stores more than `tokens`.
  placed_rows(const runs&, index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows)
      : order_{sequences},
        heads_(kv_heads),
        tokens_(tokens),
        pool_(layers * sequences, kv_heads, rows, detail::planes_of<Layout>(), "rows of the cache"),
        begins_(layers, sequences, kv_heads) {}

  view_type view(sequence_layer owner) const { return view(begins_.entry(owner), 1); }
  view_type batch_view(index_t layer, index_t batch) const { return view(begins_.batch(layer), batch); }
  detail::gathered_column column() const { return begins_.gathered(); }

  /// What a store needs to resize the pool; other placements need not have it.
  run_pool& pool() { return pool_; }
  offset_t* begins(std::size_t entry) const { return begins_.entry(order_.owner(entry)); }

  void plan() { pool_.plan(); }
  bool moves() const { return pool_.moves(); }
  void abandon() { pool_.abandon(); }

  /// Room for `tokens` more in every head.
  void plan_room(std::size_t entry, const token_bound& held, index_t tokens) {
    if (pool_.free_rows(entry) >= tokens) return;
    const index_t room = tokens + pool_.room_behind(held.longest + tokens, tokens_);
    pool_.plan_run(entry, held.total + offset_t(heads_) * room, room);
  }
  void commit_room(std::size_t entry, const index_t* lengths, const token_bound& held, cudaStream_t stream) {
    if (!pool_.lay_out(entry, lengths, [&](std::size_t p) { return begins(p); }, stream)) return;
    pool_.move(begins(entry), lengths, held.longest, stream);
    pool_.adopt(begins(entry), stream);
  }
  void grew(std::size_t entry, index_t tokens) { pool_.grew(entry, tokens); }

  void plan_keep(std::size_t entry, const token_bound&, const token_bound& kept) {
    const index_t room = pool_.room_behind(kept.longest, tokens_);
    pool_.plan_run(entry, kept.total + offset_t(heads_) * room, room);
  }
  /// `problem` has the chosen slots, the columns and the lengths. Rows move to the planned run.
  template <class Mover, class Problem>
  void keep(std::size_t entry, Problem problem, const Mover& mover, const token_bound&, cudaStream_t stream) {
    pool_.lay_out(entry, problem.chosen.counts, [&](std::size_t p) { return begins(p); }, stream);
    problem.target.table.begin = pool_.new_begins();
    mover.new_run.run(problem, nullptr, stream);
    pool_.adopt(begins(entry), stream);
  }
  void plan_copy(std::size_t to, const token_bound& held) { plan_keep(to, {}, held); }
  void commit_copy(std::size_t from, std::size_t to, const index_t* lengths, const token_bound& held,
                   cudaStream_t stream) {
    pool_.copy_run(from, to, lengths, held.longest, [&](std::size_t p) { return begins(p); }, stream);
  }
  void commit_empty(std::size_t entry, const index_t* lengths, const token_bound&, cudaStream_t stream) {
    if (pool_.lay_out(entry, lengths, [&](std::size_t p) { return begins(p); }, stream))
      pool_.adopt(begins(entry), stream);
  }
  /// Rows were dropped in place: every head has room for `gained` more.
  void shrank(std::size_t entry, index_t gained, const token_bound&) { pool_.grew(entry, -gained); }
  void dropped(std::size_t entry, index_t gained) { pool_.grew(entry, -gained); }

  void clear(std::size_t entry) { pool_.clear(entry); }
  offset_t bytes(std::size_t entry) const { return pool_.rows(entry) * Layout::token_bytes(); }
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    return {pool_.upper_bound_rows(peaks, tokens_) * Layout::token_bytes(), 0};
  }
  /// Where the pool has enough rows for every entry, they never run out.
  capacity available() const {
    const bool enough = pool_.all_rows() >= rows_for(runs{}, pool_.entries(), heads_, tokens_);
    return {enough ? capacity::unlimited : pool_.available_rows() * Layout::token_bytes(), 0};
  }
  offset_t peak_bytes() const { return pool_.peak_rows() * Layout::token_bytes(); }

 private:
  view_type view(const offset_t* begins, index_t batch) const {
    view_type view;
    view.k = pool_.template plane_data<stored_type>(0);
    view.v = pool_.template plane_data<stored_type>(1);
    view.k_strides = {0, 0, Layout::k_dim, 1};
    view.v_strides = {0, 0, Layout::v_dim, 1};
    view.sequences = batch;
    view.kv_heads = heads_;
    view.table = {begins, heads_};
    if constexpr (encoding_type::scaled) {
      view.scales = {pool_.template plane_data<float>(2), pool_.template plane_data<float>(3), 0, 0, 1};
    }
    return view;
  }

  layer_major order_;
  index_t heads_, tokens_;
  run_pool pool_;
  id_column<offset_t> begins_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
