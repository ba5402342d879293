// The slots of an engine's view sorted by position, for views that are not in that order, such as rings.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "../../../core/error.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/stored/slot_column.hpp"
#include "../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// For every (sequence, kv_head) of a view the list of its slots by ascending position. Through it operations read rows
/// that are stored in any order; they choose indexes of the list. `in_order` reorders a column beside the rows.
/// Cost     a sort of every row's slots, and 8 bytes a slot; K and V are not copied.
class ordered_slots {
 public:
  /// Lists the slots of a view, in place of an earlier one.
  /// Errors   no positions, negative lengths, two slots of one position: tessera::error, and the lists are unchanged.
  template <class View>
  void list(const View& view) {
    require(view.positions != nullptr, "positions of the view", "null", "one for every slot",
            "a view without them is in order: pass it as it is");
    ordered_slots made;
    made.heads_ = view.kv_heads;
    for (index_t row = 0; row < view.sequences * view.kv_heads; ++row)
      made.add(view, row / view.kv_heads, row % view.kv_heads);
    *this = std::move(made);
  }

  /// The listed view in order of position. Valid until the next listing.
  template <class E, int D, class Table, int Dv>
  kv_view<E, D, filtered<Table>, Dv> view(const kv_view<E, D, Table, Dv>& listed) const {
    kv_view<E, D, filtered<Table>, Dv> result;
    result.k = listed.k;
    result.v = listed.v;
    result.k_strides = listed.k_strides;
    result.v_strides = listed.v_strides;
    result.scales = listed.scales;
    result.sequences = listed.sequences;
    result.kv_heads = heads_;
    result.lengths = counts_.data();
    result.length_strides = {heads_, 1};
    result.positions = positions_.data();
    result.position_begin = begins_.data();
    result.order = slot_order::ascending;
    result.table = {listed.table, slots_.data(), begins_.data(), heads_};
    return result;
  }

  /// A column beside the rows (scores, segments) in the order of the view: pass {result.data(), 0, 0, begins()} with
  /// it.
  template <class T>
  host_vector<std::remove_const_t<T>> in_order(const slot_column<T>& column) const {
    host_vector<std::remove_const_t<T>> result;
    for (std::size_t row = 0; row < counts_.size(); ++row) {
      const T* from = column.row(index_t(row) / heads_, index_t(row) % heads_, heads_);
      for (index_t i = 0; i < counts_[row]; ++i) result.push_back(from[slot(offset_t(row), i)]);
    }
    return result;
  }
  const offset_t* begins() const { return begins_.data(); }

  /// The engine's slot of the i-th entry of a row's list, row = sequence * kv_heads + head.
  index_t slot(offset_t row, index_t i) const { return slots_[std::size_t(begins_[std::size_t(row)] + i)]; }

 private:
  template <class View>
  void add(const View& view, index_t sequence, index_t head) {
    const index_t count = view.length(sequence, head);
    require(count >= 0, "tokens of kv_head " + std::to_string(head), count, "0 or more",
            "pass how many slots are filled");
    const index_t* positions = view.positions + view.position_row(sequence, head);
    const auto first = slots_.insert(slots_.end(), std::size_t(count), 0);
    std::iota(first, slots_.end(), 0);
    std::sort(first, slots_.end(), [&](index_t a, index_t b) { return positions[a] < positions[b]; });
    for (auto slot = first; slot != slots_.end(); ++slot) {
      if (slot != first && positions[*slot] == positions_.back()) {
        fail("position of slots " + std::to_string((std::min)(slot[-1], *slot)) + " and " +
                 std::to_string((std::max)(slot[-1], *slot)),
             positions[*slot], "another one for each slot of a row", "pass every stored token's own position");
      }
      positions_.push_back(positions[*slot]);
    }
    counts_.push_back(count);
    begins_.push_back(offset_t(slots_.size()));
  }

  index_t heads_ = 0;
  host_vector<offset_t> begins_ = host_vector<offset_t>(1, 0);  // by row, and the end
  host_vector<index_t> counts_, slots_, positions_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
