// The store of a cache on the CPU: K, V and columns of every layer and sequence, for those who have no memory of their own.
#pragma once

#include <algorithm>

#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "columns.hpp"
#include "placed_pages.hpp"
#include "placed_ragged.hpp"
#include "placed_runs.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Chooses the newest `window` slots of every head (0: all) and the `fresh` ones behind them, once that frees more than
/// there is spare room. Returns whether it does.
inline bool choose_newest_slots(const host_vector<index_t>& lengths, index_t window, index_t fresh, selection& chosen) {
  const index_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (window == 0 || longest - fresh <= longest_slid(window)) return false;
  chosen.reset(lengths);
  for (std::size_t h = 0; h < lengths.size(); ++h) {
    const index_t count = (std::min)(lengths[h], window + fresh);
    for (index_t i = 0; i < count; ++i) chosen.row(index_t(h))[i] = lengths[h] - count + i;
    chosen.counts[h] = count;
  }
  return true;
}

/// Tokens of every (layer, sequence), heads of uneven length, slots in position order. The layout says what a token takes
/// and where its rows lie; positions and what a recipe asks for are columns beside them. Rows stay as they are appended: a
/// layout whose rows change later has a store of its own (packed/packed_store.hpp), of which `observe_prompt`,
/// `prepare_to_pack` and `pack` ask something.
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
      : layers_(layers), heads_(kv_heads), with_(with), rows_(where, layers, kv_heads) {}

  index_t kv_heads() const { return heads_; }
  const host_vector<index_t>& lengths(index_t layer, index_t id) const { return at(layer, id).lengths; }
  index_t longest(index_t layer, index_t id) const {
    const auto& lengths = at(layer, id).lengths;
    return *std::max_element(lengths.begin(), lengths.end());
  }
  index_t position(index_t layer, index_t id, index_t head, index_t slot) const {
    return at(layer, id).beside.position(head, slot);
  }
  /// Of all slots of a head, ascending.
  host_vector<index_t> positions(index_t layer, index_t id, index_t head) const {
    host_vector<index_t> result;
    for (index_t i = 0; i < lengths(layer, id)[std::size_t(head)]; ++i) result.push_back(position(layer, id, head, i));
    return result;
  }
  /// Columns that lie beside the tokens: head h from begins()[h] on.
  columns& beside(index_t layer, index_t id) { return at(layer, id).beside; }

  /// Makes an empty place of every layer.
  void open(index_t id) {
    const std::size_t wanted = (std::size_t(id) + 1) * std::size_t(layers_);
    while (places_.size() < wanted) places_.emplace_back(heads_, with_);
    for (index_t layer = 0; layer < layers_; ++layer) rows_.open(index(layer, id));
    clear(id);
  }
  /// Empties the places of an id that was open. Needs no memory.
  void clear(index_t id) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      rows_.clear(index(layer, id));
      std::fill(at(layer, id).lengths.begin(), at(layer, id).lengths.end(), 0);
      at(layer, id).beside.clear();
    }
  }

  /// The places of an empty id get what those of another one hold. The caller clears them where it throws.
  void copy(index_t from, index_t to) {
    for (index_t layer = 0; layer < layers_; ++layer) {
      rows_.copy(index(layer, from), index(layer, to));
      at(layer, to) = at(layer, from);
    }
  }

  /// All heads of a place as one sequence. Valid until any place changes.
  view_type view(index_t layer, index_t id) {
    place& here = at(layer, id);
    view_type view = rows_.view(index(layer, id), here.lengths);
    view.positions = here.beside.positions();
    view.position_begin = here.beside.begins().data();
    view.order = slot_order::ascending;
    return view;
  }

  /// Every head of a sequence will get `tokens` more, 0: none for now; throws where a pool has no room for them.
  void expect(index_t id, index_t tokens) { rows_.expect(id, tokens); }
  rows_type& rows() { return rows_; }
  const rows_type& rows() const { return rows_; }

  /// Appends tokens at positions `first_position`, `first_position` + 1, ...; the place is as before when memory runs out.
  template <class E>
  void append(index_t layer, index_t id, const rows_view<const E>& k, const rows_view<const E>& v,
              index_t first_position, const segment_marks& marks = {}) {
    place& here = at(layer, id);
    rows_.make_room(index(layer, id), here.lengths, k.tokens);
    here.beside.append(here.lengths, k.tokens, first_position, marks);
    cpu::append(rows_.view(index(layer, id), here.lengths), k, v);
    for (index_t& length : here.lengths) length += k.tokens;
  }

  /// Takes back what was appended at `first_position` and after it. Needs no memory.
  void take_back(index_t layer, index_t id, index_t first_position) {
    place& here = at(layer, id);
    for (index_t h = 0; h < heads_; ++h) {
      index_t& length = here.lengths[std::size_t(h)];
      while (length > 0 && here.beside.position(h, length - 1) >= first_position) --length;
    }
  }

  /// Takes the memory that the next `keep` needs: that one then cannot fail.
  void prepare_to_keep(index_t layer, index_t id) { at(layer, id).beside.prepare_to_keep(at(layer, id).lengths); }

  /// Keeps the chosen slots of every head and drops the rest; the place is as before when memory runs out. Returns whether
  /// anything was dropped.
  bool keep(index_t layer, index_t id, const selection& chosen, executor& workers) {
    place& here = at(layer, id);
    if (chosen.counts == here.lengths) return false;
    here.beside.keep(here.lengths, chosen);
    rows_.keep(index(layer, id), here.lengths, chosen, workers);
    std::copy(chosen.counts.begin(), chosen.counts.end(), here.lengths.begin());
    return true;
  }

  /// As `choose_newest_slots`.
  bool choose_newest(index_t layer, index_t id, index_t window, index_t fresh, selection& chosen) const {
    return choose_newest_slots(at(layer, id).lengths, window, fresh, chosen);
  }

  template <class E>
  void prepare_to_observe(index_t, index_t, const rows_view<const E>&) {}
  template <class E>
  void observe_prompt(index_t, index_t, const rows_view<const E>&, index_t) {}
  void prepare_to_pack(index_t, index_t, const selection*, bool, executor&) {}
  void pack(index_t, index_t, executor&) {}
  void settle(index_t) {}

  /// Bytes of K and V that attention reads of each token, and, where tokens differ, of the chosen slots of a view (null: all).
  static constexpr offset_t token_bytes() { return Layout::token_bytes(); }
  template <class View>
  static constexpr offset_t uneven_bytes(const View&, const selection_view*) {
    return 0;
  }

  /// Bytes that are allocated for one place: rows and columns.
  offset_t bytes(index_t layer, index_t id) const {
    return rows_.bytes(index(layer, id)) + at(layer, id).beside.bytes();
  }

 private:
  struct place {
    place(index_t kv_heads, const column_set& with) : lengths(std::size_t(kv_heads), 0), beside(kv_heads, with) {}
    host_vector<index_t> lengths;
    columns beside;
  };

  std::size_t index(index_t layer, index_t id) const {
    return std::size_t(id) * std::size_t(layers_) + std::size_t(layer);
  }
  const place& at(index_t layer, index_t id) const { return places_[index(layer, id)]; }
  place& at(index_t layer, index_t id) { return places_[index(layer, id)]; }

  index_t layers_, heads_;
  column_set with_;
  rows_type rows_;
  host_vector<place> places_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
