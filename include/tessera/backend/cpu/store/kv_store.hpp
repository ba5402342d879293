// The store of a cache on the CPU: K, V and columns of every layer and sequence, in its own memory.
#pragma once

#include <algorithm>

#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/sequence_layer.hpp"
#include "../../../core/stored/packing_moment.hpp"
#include "columns.hpp"
#include "placed_pages.hpp"
#include "placed_ragged.hpp"
#include "placed_runs.hpp"
#include "transfer_view.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Chooses the newest `window` slots of every head (0: all) and the `added` ones behind them, once that frees more than
/// the spare rows. Returns whether it does.
inline bool choose_newest_slots(const host_vector<index_t>& lengths, index_t window, index_t added, selection& chosen) {
  const index_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (window == 0 || longest - added <= longest_slid(window)) return false;
  chosen.reset(lengths);
  for (std::size_t h = 0; h < lengths.size(); ++h) {
    const index_t count = (std::min)(lengths[h], window + added);
    for (index_t i = 0; i < count; ++i) chosen.row(index_t(h))[i] = lengths[h] - count + i;
    chosen.counts[h] = count;
  }
  return true;
}

/// Bytes of the columns of a sequence with these peaks. A layer whose columns grow counts twice.
inline offset_t column_bytes(const column_set& with, const host_vector<layer_peak>& peaks) {
  offset_t rows = 0, largest = 0;
  for (const layer_peak& peak : peaks) {
    const offset_t of_layer = rows_with_room(peak.stored.by_head);
    rows += of_layer;
    largest = (std::max)(largest, of_layer);
  }
  return (rows + largest) * with.token_bytes();
}

/// Tokens of every (layer, sequence): heads of uneven length, slots in position order. The layout defines the encoding
/// and the placement of rows. Positions, and numbers that a recipe needs, are columns beside them. Rows stay as they
/// are appended. A layout whose rows change later has a store of its own (packed/packed_store.hpp), and only there
/// `observe_prompt`, `plan_packing` and `commit_packing` have work to do.
template <class Layout>
class kv_store {
  static_assert(
      !requires { requires Layout::rows_type::packs; },
      "tessera: packed rows have a store of their own; include backend/cpu/store/packed/packed_store.hpp");

 public:
  using rows_type = placed_rows<Layout>;
  using view_type = typename rows_type::view_type;
  using placement_type = typename Layout::placement_type;

  kv_store(index_t layers, index_t kv_heads, const column_set& with, const placement_type& where = {},
           const Layout& = {})
      : order_{layers}, heads_(kv_heads), with_(with), rows_(where, layers, kv_heads), stored_(layers) {}

  index_t kv_heads() const { return heads_; }
  const host_vector<index_t>& lengths(sequence_layer owner) const { return stored_[owner].lengths; }
  index_t longest(sequence_layer owner) const {
    const auto& lengths = stored_[owner].lengths;
    return *std::max_element(lengths.begin(), lengths.end());
  }
  index_t position(sequence_layer owner, index_t head, index_t slot) const {
    return stored_[owner].beside.position(head, slot);
  }
  /// The positions of all slots of a head, ascending.
  host_vector<index_t> positions(sequence_layer owner, index_t head) const {
    host_vector<index_t> result;
    for (index_t i = 0; i < lengths(owner)[std::size_t(head)]; ++i) result.push_back(position(owner, head, i));
    return result;
  }
  /// Columns that lie beside the tokens: head h from begins()[h] on.
  columns& beside(sequence_layer owner) { return stored_[owner].beside; }

  /// Opens a sequence without tokens.
  void open(index_t id) {
    stored_.open(id, stored_tokens(heads_, with_));
    for (index_t layer = 0; layer < order_.layers; ++layer) rows_.open(order_.index({layer, id}));
    clear(id);
  }
  /// Empties an open sequence and releases its memory. Needs none.
  void clear(index_t id) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      rows_.clear(order_.index({layer, id}));
      std::fill(stored_[sequence_layer{layer, id}].lengths.begin(), stored_[sequence_layer{layer, id}].lengths.end(),
                0);
      stored_[sequence_layer{layer, id}].beside.clear();
    }
  }

  /// Copies a sequence to an empty one, which the caller clears where this throws.
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      rows_.copy(order_.index({layer, from}), order_.index({layer, to}));
      stored_[sequence_layer{layer, to}] = stored_[sequence_layer{layer, from}];
    }
  }

  /// Saves the lengths of a sequence, or loads those of one whose rows come next, into an empty one, which the caller
  /// clears where this throws. next(layer): the layer's next position.
  template <class Next, class Archive>
  void transfer_lengths_of(index_t id, const Next& next, Archive& archive) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      stored_tokens& stored = stored_[sequence_layer{layer, id}];
      transfer_lengths(stored.lengths, next(layer), archive);
      stored.beside.transfer_kind(stored.lengths, next(layer), archive);
    }
  }
  /// Saves or loads its rows and columns.
  template <class Next, class Archive>
  void transfer_rows_of(index_t id, const Next& next, Archive& archive) {
    for (index_t layer = 0; layer < order_.layers; ++layer) {
      const std::size_t entry = order_.index({layer, id});
      stored_tokens& stored = stored_[sequence_layer{layer, id}];
      if constexpr (Archive::loads) rows_.lay_out(entry, stored.lengths);
      stored.beside.transfer(stored.lengths, next(layer), archive);
      transfer_view(rows_.view(entry, stored.lengths), archive);
    }
  }

  /// The rows of a layer of a sequence. Valid until any layer of any sequence changes.
  view_type view(sequence_layer owner) {
    stored_tokens& stored = stored_[owner];
    view_type view = rows_.view(order_.index(owner), stored.lengths);
    view.positions = stored.beside.positions();
    view.position_begin = stored.beside.begins().data();
    view.order = slot_order::ascending;
    return view;
  }

  /// Reserves memory for `tokens` more in every head of a sequence, 0: none. Throws where a pool has no more.
  /// `moves_rows`: rows that are stored may move, too.
  void expect(index_t id, index_t tokens, bool moves_rows = false) { rows_.expect(id, tokens, moves_rows); }
  rows_type& rows() { return rows_; }
  const rows_type& rows() const { return rows_; }

  /// Appends tokens at positions `first_position`, `first_position` + 1, ... Nothing changes when memory runs out.
  template <class E>
  void append(sequence_layer owner, const rows_view<const E>& k, const rows_view<const E>& v, index_t first_position,
              const segment_marks& marks = {}) {
    stored_tokens& stored = stored_[owner];
    rows_.make_room(order_.index(owner), stored.lengths, k.tokens);
    stored.beside.append(stored.lengths, k.tokens, first_position, marks);
    cpu::append(rows_.view(order_.index(owner), stored.lengths), k, v);
    for (index_t& length : stored.lengths) length += k.tokens;
  }

  /// Removes tokens from position `first_position` on. Needs no memory.
  void abandon(sequence_layer owner, index_t first_position) {
    stored_tokens& stored = stored_[owner];
    for (index_t h = 0; h < heads_; ++h) {
      index_t& length = stored.lengths[std::size_t(h)];
      while (length > 0 && stored.beside.position(h, length - 1) >= first_position) --length;
    }
  }

  /// The same, for tokens of whole calls: releases what they took, and what was reserved.
  void truncate(sequence_layer owner, index_t first_position) {
    abandon(owner, first_position);
    rows_.truncate(order_.index(owner), stored_[owner].lengths);
  }
  /// The smallest position that a sequence can go back to, as far as its rows decide it.
  index_t settled(sequence_layer, index_t) const { return 0; }
  void forget_prompt(sequence_layer, index_t = 0) {}

  /// Allocates the memory of the next `keep` of these slots, which then cannot fail.
  void plan_keep(sequence_layer owner, const selection& chosen) {
    const stored_tokens& stored = stored_[owner];
    if (chosen.counts == stored.lengths) return;
    stored_[owner].beside.plan_keep(stored.lengths);
    rows_.plan_keep(order_.index(owner), stored.lengths, chosen);
  }

  /// Keeps the chosen slots of every head and drops the rest. Nothing changes when memory runs out. Returns whether
  /// anything was dropped.
  bool keep(sequence_layer owner, const selection& chosen, executor& workers) {
    stored_tokens& stored = stored_[owner];
    if (chosen.counts == stored.lengths) return false;
    plan_keep(owner, chosen);
    stored.beside.keep(stored.lengths, chosen);
    rows_.keep(order_.index(owner), stored.lengths, chosen, workers);
    std::copy(chosen.counts.begin(), chosen.counts.end(), stored.lengths.begin());
    return true;
  }

  /// As `choose_newest_slots`.
  bool choose_newest(sequence_layer owner, index_t window, index_t added, selection& chosen) const {
    return choose_newest_slots(stored_[owner].lengths, window, added, chosen);
  }

  template <class E>
  void plan_observation(sequence_layer, const rows_view<const E>&) {}
  template <class E>
  void observe_prompt(sequence_layer, const rows_view<const E>&, index_t) {}
  void plan_packing(sequence_layer, const selection*, packing_moment, executor&) {}
  static constexpr bool packs_chunks() { return false; }
  void commit_packing(sequence_layer, executor&) {}
  void settle(index_t) {}

  /// Bytes of K and V that attention reads of each token, and, where tokens differ, of the chosen slots of a view
  /// (null: all).
  static constexpr offset_t token_bytes() { return Layout::token_bytes(); }
  template <class View>
  static constexpr offset_t uneven_bytes(const View&, const selection_view*) {
    return 0;
  }

  /// Bytes allocated for the rows and columns of a layer of a sequence.
  offset_t bytes(sequence_layer owner) const {
    return rows_.bytes(order_.index(owner)) + stored_[owner].beside.bytes();
  }
  /// The most that a new sequence with these peaks takes, and what no sequence has or has reserved.
  capacity upper_bound(const host_vector<layer_peak>& peaks) const {
    capacity bound = rows_.upper_bound(peaks);
    bound.bytes += column_bytes(with_, peaks);
    return bound;
  }
  capacity available() const { return rows_.available(); }

 private:
  struct stored_tokens {
    stored_tokens() = default;
    stored_tokens(index_t kv_heads, const column_set& with)
        : lengths(std::size_t(kv_heads), 0), beside(kv_heads, with) {}
    host_vector<index_t> lengths;
    columns beside;
  };

  sequence_major order_;
  index_t heads_;
  column_set with_;
  rows_type rows_;
  sequence_table<stored_tokens> stored_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
