// The store of a cache on the device: K, V, lengths and columns of every layer and sequence.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../core/stored/packing_moment.hpp"
#include "../../../runtime/layer_roles.hpp"
#include "../cache_options.hpp"
#include "append.cuh"
#include "detail/column_runs.cuh"
#include "detail/placed_pages.cuh"
#include "detail/placed_ragged.cuh"
#include "detail/placed_runs.cuh"
#include "pack.cuh"
#include "saved_layer.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Chosen slots, and bounds of their number that the host knows.
struct kept_slots {
  selection_view chosen;
  kept_bound bound;
};

/// The segments of new tokens, on the device; null where a store has no segments.
struct new_segments {
  const std::uint8_t* boundaries = nullptr;  ///< [sequences, tokens]
  segment_cursor* texts = nullptr;           ///< [sequences]
};

/// Stores the tokens of every (layer, sequence). Heads may store different numbers of tokens. Slots are in position
/// order. The layout decides what a token takes and where its rows lie. Positions (where tokens are dropped), scores
/// (where they accumulate) and segments (where a recipe reads them) are columns in runs.
///
/// The device holds lengths and addresses; the host holds bounds only. All calls of one store follow one another on one
/// stream. Calls that need room plan it for every entry first: when they throw, nothing has changed.
template <class Layout>
class kv_store {
 public:
  using T = typename Layout::element_type;
  using rows_type = placed_rows<Layout>;
  using view_type = typename rows_type::view_type;
  struct movers {
    pack<view_type, view_type> new_run;
    pack<view_type, view_type, true> in_place;
    device_buffer<unsigned char> scratch;
  };

  kv_store(index_t layers, index_t sequences, index_t kv_heads, index_t tokens, offset_t rows, const column_set& with,
           const typename Layout::placement_type& where = {}, const Layout& = {}, const layer_roles* = nullptr)
      : layers_(layers),
        order_{sequences},
        heads_(kv_heads),
        tokens_(tokens),
        with_(with),
        stored_(layers * sequences, kv_heads),
        rows_(where, layers, sequences, kv_heads, tokens,
              rows > 0 ? rows : rows_type::rows_for(where, layers * sequences, kv_heads, tokens)),
        columns_(with, layers, sequences, kv_heads, tokens),
        lengths_(layers, sequences, kv_heads) {}

  /// Whether groups of heads share the pages of one pool.
  static constexpr bool in_groups = requires(const rows_type& rows) { rows.groups(); };

  index_t kv_heads() const { return heads_; }
  const token_bound& bound(sequence_layer owner) const { return stored_.bound(order_.index(owner)); }
  /// An upper bound of what each kv_head stores; exact where lengths alone decide what stays.
  host_vector<index_t> held_by_head(sequence_layer owner) const { return stored_.by_head(order_.index(owner)); }
  index_t stored(sequence_layer owner, index_t head) const { return stored_.tokens(order_.index(owner)).head(head); }
  index_t* lengths(sequence_layer owner) const { return lengths_.entry(owner); }

  view_type scored_view(sequence_layer owner, cudaStream_t) const { return view(owner); }
  /// A view of one sequence of a layer; scorers see it too.
  view_type view(sequence_layer owner) const {
    return with_columns(rows_.view(owner), lengths_.entry(owner), columns_.begins_of(owner));
  }
  /// A view of the batch that the step table gathered.
  view_type batch_view(index_t layer, index_t batch) const {
    return with_columns(rows_.batch_view(layer, batch), lengths_.batch(layer), columns_.begins_column().batch(layer));
  }
  host_vector<detail::gathered_column> gathered() const {
    return {lengths_.gathered(), columns_.begins_column().gathered(), rows_.column()};
  }
  slot_column<index_t> positions(const view_type& view) const {
    return {columns_.positions(), 0, 0, view.position_begin};
  }
  slot_column<float> scores(const view_type& view) const { return {scores(), 0, 0, view.position_begin}; }
  float* scores() const { return columns_.scores(); }
  slot_column<const index_t> segments(const view_type& view) const {
    return {columns_.segments(), 0, 0, view.position_begin};
  }

  void require_fits(sequence_layer owner, index_t tokens) const {
    require_tokens_of_head(offset_t(bound(owner).longest) + tokens, tokens_);
  }

  /// See run_pool::hold_at_least.
  void hold_at_least(index_t tokens) {
    if constexpr (requires(rows_type& stored) { stored.pool(); }) rows_.pool().hold_at_least(tokens);
    columns_.hold_at_least(tokens);
  }
  /// Plans room for `tokens` more in every head of these entries. `commit_room` makes it, or `abandon` forgets it.
  /// `moves_rows`: rows that are stored will move in place, as `keep_in_place` does.
  void plan_room(const sequence_layers& owners, index_t tokens, bool moves_rows, cudaStream_t = nullptr) {
    for (const sequence_layer owner : owners) require_fits(owner, tokens);
    moves_rows_ = moves_rows;
    plan_changes([&] {
      for (const sequence_layer owner : owners) {
        const std::size_t entry = order_.index(owner);
        rows_.plan_room(entry, stored_.tokens(entry, moves_rows_), tokens);
        if (columns_.holds_planes() && columns_.free_rows(entry) < tokens)
          columns_.plan_rows(entry, stored_.bound(entry), tokens);
      }
    });
  }
  bool moves() const { return rows_.moves() || columns_.moves(); }  ///< rows of other entries
  void abandon() {
    rows_.abandon();
    columns_.abandon();
  }
  void commit_room(const sequence_layers& owners, cudaStream_t stream) {
    for (const sequence_layer owner : owners) {
      const std::size_t entry = order_.index(owner);
      rows_.commit_room(entry, lengths(owner), stored_.tokens(entry, moves_rows_), stream);
      if (columns_.lay_out_rows(entry, lengths(owner), stream)) {
        columns_.move(columns_.begins(entry), lengths(owner), stored_.bound(entry).longest, stream);
        columns_.adopt(columns_.begins(entry), stream);
      }
    }
    if constexpr (in_groups) rows_.finish(stream);
  }
  /// Sets pages of a shared pool aside for `tokens` more in every head of every layer.
  void expect(index_t id, index_t tokens, bool moves_rows = false) {
    if constexpr (in_groups) {
      rows_.expect(id, tokens, [&](index_t layer) { return stored_.tokens(order_.index({layer, id}), moves_rows); });
    }
  }
  const rows_type& rows() const { return rows_; }
  rows_type& rows() { return rows_; }
  /// Moves all rows to new memory, which holds what is stored and `tokens` more in every head, and releases the old
  /// memory. Rows in pages stay. Errors: not enough memory; then nothing has changed.
  void resize(index_t tokens, cudaStream_t stream) {
    if constexpr (requires(rows_type& stored) { stored.pool(); }) {
      run_pool& rows = rows_.pool();
      const offset_t count = rows.rows_to_take(stored_.bounds(), tokens, tokens_),
                     columns = columns_.rows_to_take(stored_.bounds(), tokens, tokens_);
      auto planes = rows.planes_for(count), column_planes = columns_.planes_for(columns);
      rows.move_to(std::move(planes), count, [&](std::size_t p) { return rows_.begins(p); }, stream);
      columns_.move_to(std::move(column_planes), columns, [&](std::size_t p) { return columns_.begins(p); }, stream);
    }
  }
  /// Notes on the host that every head grew by `tokens`, or lost its newest ones.
  void grew(sequence_layer owner, index_t tokens) {
    const std::size_t entry = order_.index(owner);
    stored_.grew(entry, tokens);
    rows_.grew(entry, tokens);
    if (columns_.holds_planes()) columns_.grew(entry, tokens);
  }
  void drop_newest(sequence_layer owner, index_t tokens) {
    const std::size_t entry = order_.index(owner);
    stored_.grew(entry, -tokens);
    rows_.shrank(entry, tokens, stored_.tokens(entry));
    if (columns_.holds_planes()) columns_.grew(entry, -tokens);
  }
  /// The smallest position that a sequence's rows can go back to; tokens of every head since slots were chosen.
  index_t settled(sequence_layer, index_t) const { return 0; }
  index_t since_choice(sequence_layer owner) const { return stored_.tokens(order_.index(owner)).since; }
  void forget_prompt(sequence_layer) {}

  /// Appends rows behind a view's tokens: new_tokens[sequence], or all if it is null. Positions count from
  /// first_position[sequence]. The view's lengths advance, and so do the texts where the store holds segments.
  void append_rows(const view_type& view, const rows_view<const T>& k, const rows_view<const T>& v,
                   const index_t* first_position, const index_t* new_tokens, const new_segments& text,
                   cudaStream_t stream) const {
    append_problem<view_type, T> problem;
    problem.view = view, problem.k = k, problem.v = v;
    problem.lengths = const_cast<index_t*>(view.lengths);
    problem.first_position = first_position, problem.new_tokens = new_tokens;
    if (with_.positions) problem.positions = positions(view);
    if (with_.scores) problem.scores = scores(view);
    if (with_.segments) {
      problem.segments = {columns_.segments(), 0, 0, view.position_begin};
      problem.boundaries = text.boundaries;
      problem.texts = text.texts;
    }
    append<view_type, T>(view.sequences, heads_).run(problem, nullptr, stream);
  }

  /// Makes the operations that move rows, of one sequence and, in steps, of `batch` sequences. They keep at most `kept`
  /// tokens per head. `adopt` makes them the store's operations.
  movers fit(index_t batch, index_t kept, const device_info& device) const {
    movers fitted{{1, heads_, kept, device}, {batch, heads_, kept, device}, {}};
    fitted.scratch = device_buffer<unsigned char>(fitted.in_place.workspace_bytes());  // made as zeros: no `prepare`
    return fitted;
  }
  void adopt(movers&& fitted) { movers_.emplace(std::move(fitted)); }

  /// Plans what the entries keep: every owner with its bound, in the order of the `keep` calls that follow.
  void plan_keep(const sequence_layers& owners, const host_vector<kept_bound>& kept, cudaStream_t = nullptr) {
    plan_changes([&] {
      for (std::size_t i = 0; i < owners.size(); ++i) {
        const std::size_t entry = order_.index(owners[i]);
        rows_.plan_keep(entry, stored_.bound(entry), kept[i]);
        if (columns_.holds_planes()) columns_.plan_rows(entry, kept[i], 0);
      }
    });
  }
  /// Keeps the chosen slots of one sequence's layer and releases the rest.
  void keep(sequence_layer owner, const kept_slots& kept, cudaStream_t stream) {
    const std::size_t entry = order_.index(owner);
    const view_type from = view(owner);
    pack_problem<view_type, view_type> problem{from, kept.chosen, from};
    problem.lengths = lengths(owner);
    stored_.keep(entry, kept.bound);
    if constexpr (rows_type::keeps_in_place) {
      columns_.add_to(problem, from.position_begin);
      rows_.keep(entry, problem, *movers_, stored_.tokens(entry), stream);
      if (columns_.lay_out_rows(entry, lengths(owner), stream)) {
        columns_.move(columns_.begins(entry), lengths(owner), kept.bound.longest, stream);
        columns_.adopt(columns_.begins(entry), stream);
      }
    } else {
      columns_.lay_out_rows(entry, kept.chosen.counts, stream);
      columns_.add_to(problem, columns_.new_begins());
      rows_.keep(entry, problem, *movers_, stored_.tokens(entry), stream);
      if (columns_.holds_planes()) columns_.adopt(columns_.begins(entry), stream);
    }
  }
  /// The same for a batch, in place; it can be recorded. The view's lengths shrink: see `shrank`.
  void keep_in_place(const view_type& batch, const selection_view& chosen, cudaStream_t stream) const {
    pack_problem<view_type, view_type> problem{batch, chosen, batch};
    columns_.add_to(problem, batch.position_begin);
    problem.lengths = const_cast<index_t*>(batch.lengths);
    movers_->in_place.run(problem, movers_->scratch.data(), stream);
  }
  /// Notes on the host what `keep_in_place` dropped; `gained`: every head has room for so many more tokens.
  void shrank(sequence_layer owner, const token_bound& kept, index_t gained) {
    const std::size_t entry = order_.index(owner);
    stored_.shrank(entry, kept);
    rows_.shrank(entry, gained, stored_.tokens(entry));
    if (columns_.holds_planes()) columns_.grew(entry, -gained);
  }
  /// The same for rows that are dropped after room for new tokens was made, which lies among the dropped rows: only
  /// pages beyond it are released.
  void dropped(sequence_layer owner, const kept_bound& kept, index_t gained) {
    const std::size_t entry = order_.index(owner);
    stored_.keep(entry, kept);
    rows_.dropped(entry, gained, kept);
    if (columns_.holds_planes()) columns_.grew(entry, -gained);
  }

  /// Hooks for stores whose rows are packed; see packed/packed_store.cuh. A plain store does nothing.
  void settle(const host_vector<index_t>&, bool, cudaStream_t) {}
  static constexpr bool packs_chunks() { return false; }
  void plan_packing(const sequence_layers&, packing_moment, index_t, cudaStream_t) {}
  void commit_packing(cudaStream_t) {}
  void pack_layer(sequence_layer, index_t, cudaStream_t) {}
  void finish_layer(cudaStream_t) {}
  void observe_prompt(sequence_layer, const rows_view<const T>&, cudaStream_t) {}
  /// Newest tokens of a head that every step reads, whatever it chooses.
  index_t always_read(sequence_layer) const { return 0; }
  /// Bytes of K and V that a step reads of a head when it attends `attended` tokens.
  offset_t step_bytes(sequence_layer, offset_t attended) const { return attended * Layout::token_bytes(); }

  /// Forgets a sequence and releases its rows.
  void clear(index_t id, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      rows_.clear(order_.index({layer, id}));
      if (columns_.holds_planes()) columns_.clear(order_.index({layer, id}));
      stored_.clear(order_.index({layer, id}));
      check(cudaMemsetAsync(lengths({layer, id}), 0, std::size_t(heads_) * sizeof(index_t), stream), "cudaMemsetAsync");
    }
  }

  /// Lengths by id. Lengths of the batch that a step changes are scattered back to this column. The host's part of a
  /// step advances the others.
  const id_column<index_t>& length_column() const { return lengths_; }

  /// Plans a copy of one id to an empty one. `commit_copy` carries it out, or `abandon` forgets it.
  void plan_copy(index_t from, index_t to, cudaStream_t = nullptr) {
    plan_changes([&] {
      for (index_t layer = 0; layer < layers_; ++layer) {
        const std::size_t source = order_.index({layer, from}), entry = order_.index({layer, to});
        rows_.plan_copy(source, entry, stored_.tokens(source));
        if (columns_.holds_planes()) columns_.plan_rows(entry, bound({layer, from}), 0);
      }
    });
  }
  void commit_copy(index_t from, index_t to, cudaStream_t stream) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      const std::size_t source = order_.index({layer, from}), entry = order_.index({layer, to});
      rows_.commit_copy(source, entry, lengths({layer, from}), stored_.tokens(source), stream);
      columns_.copy_run(
          source, entry, lengths({layer, from}), bound({layer, from}).longest,
          [&](std::size_t p) { return columns_.begins(p); }, stream);
      stored_.copy(source, entry);
    }
    rows_.copy_tables(from, to, stream);
    lengths_.copy(from, to, stream);
  }

  /// Makes an empty entry one whose heads store `counts` tokens, of which nothing is written yet: see stored_bounds.
  void lay_out(sequence_layer owner, const host_vector<index_t>& counts, index_t since, cudaStream_t stream) {
    const index_t longest = *std::max_element(counts.begin(), counts.end());
    if (longest == 0) return;
    require_tokens_of_head(longest, tokens_);
    const std::size_t entry = order_.index(owner);
    stored_.lay_out(entry, counts, since);
    try {
      plan_changes([&] {
        rows_.plan_empty(entry, stored_.tokens(entry));
        if (columns_.holds_planes()) columns_.plan_rows(entry, stored_.bound(entry), 0);
      });
    } catch (...) {
      stored_.clear(entry);
      throw;
    }
    check(
        cudaMemcpyAsync(lengths(owner), counts.data(), counts.size() * sizeof(index_t), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
    rows_.commit_empty(entry, lengths(owner), stored_.tokens(entry), stream);
    if (columns_.lay_out_rows(entry, lengths(owner), stream)) columns_.adopt(columns_.begins(entry), stream);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  const column_set& with() const { return with_; }
  /// The columns of a layer of a sequence, for `transfer_layer`.
  detail::cached_columns columns_of(sequence_layer owner) const {
    return {{reinterpret_cast<std::uint32_t*>(columns_.positions()), reinterpret_cast<std::uint32_t*>(scores()),
             reinterpret_cast<std::uint32_t*>(columns_.segments())},
            columns_.begins_of(owner)};
  }

  /// Logical positions by kv_head, ascending. Synchronises.
  host_vector<host_vector<index_t>> downloaded_positions(sequence_layer owner) const {
    const auto held = downloaded(lengths(owner), std::size_t(heads_));
    const auto first = downloaded(columns_.begins_of(owner), std::size_t(heads_));
    host_vector<host_vector<index_t>> all(held.size());
    for (std::size_t h = 0; h < held.size(); ++h) {
      if (with_.positions) {
        all[h] = downloaded(columns_.positions() + first[h], std::size_t(held[h]));
      } else {
        all[h].resize(std::size_t(held[h]));
        std::iota(all[h].begin(), all[h].end(), 0);
      }
    }
    return all;
  }

  offset_t bytes(sequence_layer owner) const {
    return rows_.bytes(order_.index(owner)) + columns_.rows(order_.index(owner)) * columns_.row_bytes();
  }
  /// An upper bound of what a new sequence with these peaks takes. Columns always have enough memory.
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    const capacity rows = rows_.upper_bound(peaks);
    return {rows.bytes + columns_.upper_bound_rows(peaks, tokens_) * columns_.row_bytes(), rows.pages};
  }
  capacity available() const { return rows_.available(); }
  offset_t peak_bytes() const { return rows_.peak_bytes() + columns_.peak_rows() * columns_.row_bytes(); }

 private:
  /// Begins a plan and calls plan(); where it throws, the plan is forgotten.
  template <class Plan>
  void plan_changes(const Plan& plan) {
    rows_.plan();
    columns_.plan();
    try {
      plan();
    } catch (...) {
      abandon();
      throw;
    }
  }
  view_type with_columns(view_type view, const index_t* lengths, const offset_t* begins) const {
    view.lengths = lengths;
    view.length_strides = {heads_, 1};
    view.position_begin = begins;
    view.positions = columns_.positions();
    view.order = slot_order::ascending;
    return view;
  }
  index_t layers_;
  layer_major order_;
  index_t heads_, tokens_;
  column_set with_;
  bool moves_rows_ = false;  // of the plan of `plan_room`
  stored_bounds stored_;
  rows_type rows_;
  detail::column_runs columns_;
  id_column<index_t> lengths_;
  std::optional<movers> movers_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
