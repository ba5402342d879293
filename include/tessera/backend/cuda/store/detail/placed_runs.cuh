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
#include "stored_bounds.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

// Copies pages of rows within a pool.

namespace detail {

inline constexpr int copies_at_a_time = 128;
struct some_copies {
  index_t source[copies_at_a_time], target[copies_at_a_time], index[copies_at_a_time];
};
/// Copies pages, and writes the number of each target to its place in `table`, null: not. blockIdx: x is a pair of
/// pages, y a plane, whose `row_bytes` are those of a page.
template <int Threads>
__global__ void __launch_bounds__(Threads) copy_pages_entry(const __grid_constant__ plane_list list,
                                                            const __grid_constant__ some_copies given, index_t* table) {
  const plane p = list.planes[blockIdx.y];
  const offset_t page_words = p.row_bytes / 4;
  const auto* source = reinterpret_cast<const std::uint32_t*>(p.data) + given.source[blockIdx.x] * page_words;
  auto* target = reinterpret_cast<std::uint32_t*>(p.data) + given.target[blockIdx.x] * page_words;
  for (offset_t i = threadIdx.x; i < page_words; i += Threads) target[i] = source[i];
  if (table && blockIdx.y == 0 && threadIdx.x == 0) table[given.index[blockIdx.x]] = given.target[blockIdx.x];
}

}  // namespace detail

/// Pages that are to be copied within a pool, because an entry writes to what it shares with others.
class page_copies {
 public:
  /// Allocates host memory for so many in all.
  void make_room(std::size_t count) { pages_.reserve(count); }
  /// `index`: where a table has the page.
  void add(index_t source, index_t target, index_t index = 0) { pages_.push_back({source, target, index}); }

  /// Copies them, and forgets them. `rows`: of a page; `scales`: of `pages` pages, those of K and then those of V;
  /// `table` gets the targets, null: no table.
  template <class Layout, class Stored>
  void run(Stored* k, Stored* v, float* scales, offset_t pages, offset_t rows, index_t* table, cudaStream_t stream) {
    if (pages_.empty()) return;
    constexpr bool scaled = Layout::encoding_type::scaled;
    detail::plane_list list;
    const auto plane_of = [&](auto* data, offset_t elements) {
      return plane{reinterpret_cast<std::byte*>(data), index_t(rows * elements * offset_t(sizeof(*data)))};
    };
    constexpr int unit = elements_of_unit<Stored>;
    list.planes[0] = plane_of(k, Layout::k_dim / unit), list.planes[1] = plane_of(v, Layout::v_dim / unit);
    if constexpr (scaled) list.planes[2] = plane_of(scales, 1), list.planes[3] = plane_of(scales + pages * rows, 1);
    for (std::size_t first = 0; first < pages_.size(); first += detail::copies_at_a_time) {
      detail::some_copies some;
      const std::size_t count = (std::min)(pages_.size() - first, std::size_t(detail::copies_at_a_time));
      for (std::size_t i = 0; i < count; ++i) {
        some.source[i] = pages_[first + i].source, some.target[i] = pages_[first + i].target;
        some.index[i] = pages_[first + i].index;
      }
      detail::copy_pages_entry<256><<<dim3(unsigned(count), scaled ? 4 : 2), 256, 0, stream>>>(list, some, table);
      check(cudaGetLastError(), "launch of copy_pages");
    }
    pages_.clear();
  }

 private:
  struct copy {
    index_t source, target, index;
  };
  host_vector<copy> pages_;
};

/// Where a cache's rows lie; specialised by placement. An entry is layer * sequences + id. Changes are first planned on
/// the host: call `plan`, then any number of `plan_room` and `plan_keep`. Then call `commit_room` or `keep` for the
/// same entries in the same order, or `abandon`. Members:
///   rows_for(placement, entries, kv_heads, tokens)   rows of a pool that suffices
///   constructor                         (placement, layers, sequences, kv_heads, tokens, rows)
///   view(owner), batch_view(layer, batch)   rows without lengths and positions
///   column()                            what a step table has to gather
///   plan_room(entry, held, tokens), commit_room(entry, lengths, held, stream)   pages that others have too are
///                                       replaced by copies where slots from held.least on lie
///   plan_keep(entry, held, kept), keep(...)   only the chosen slots stay
///   shrank(entry, gained, held)         rows were dropped; the placement may release their room
///   dropped(entry, gained, held)        rows were dropped; room that was committed before stays
///   plan_copy(from, to, held), commit_copy(from, to, lengths, held, stream)   an empty entry gets what `from`
///                                       stores, with these bounds and lengths; pages are shared
///   copy_tables(id, to, stream)         what the device knows of shared pages, behind all of a sequence's copies
///   plan_empty(entry, held), commit_empty(entry, lengths, held, stream)   the same without rows
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
  using stored = typename encoding::stored_type;
  constexpr int unit = elements_of_unit<stored>;
  host_vector<index_t> bytes{index_t(Layout::k_dim / unit * sizeof(stored)),
                             index_t(Layout::v_dim / unit * sizeof(stored))};
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
  void plan_copy(std::size_t, std::size_t to, const token_bound& held) { plan_empty(to, held); }
  void plan_empty(std::size_t entry, const token_bound& held) { plan_keep(entry, {}, held); }
  void commit_copy(std::size_t from, std::size_t to, const index_t* lengths, const token_bound& held,
                   cudaStream_t stream) {
    pool_.copy_run(from, to, lengths, held.longest, [&](std::size_t p) { return begins(p); }, stream);
  }
  void copy_tables(index_t, index_t, cudaStream_t) const {}
  void commit_empty(std::size_t entry, const index_t* lengths, const token_bound&, cudaStream_t stream) {
    if (pool_.lay_out(entry, lengths, [&](std::size_t p) { return begins(p); }, stream))
      pool_.adopt(begins(entry), stream);
  }
  /// Rows were dropped in place: every head has room for `gained` more.
  void shrank(std::size_t entry, index_t gained, const token_bound&) { pool_.grew(entry, -gained); }
  void dropped(std::size_t entry, index_t gained, const token_bound&) { pool_.grew(entry, -gained); }

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
    view.k_strides = {0, 0, view_type::k_units, 1};
    view.v_strides = {0, 0, view_type::v_units, 1};
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
