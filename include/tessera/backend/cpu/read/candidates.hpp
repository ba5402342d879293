// The slots that the steps of a turn may read, for every kv_head: a filter's choice, and the tokens decoded since.
#pragma once

#include <algorithm>
#include <numeric>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/stored/room.hpp"
#include "../../../core/views.hpp"
#include "../../../runtime/saved/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A view of some slots of a view of one sequence: head h has the `counts[h]` slots from slots[begins[h]] on.
template <class T, int D, class Table, int Dv>
kv_view<T, D, filtered<Table>, Dv> view_of_slots(const kv_view<T, D, Table, Dv>& all, const index_t* slots,
                                                 const offset_t* begins, const index_t* counts,
                                                 const index_t* positions) {
  kv_view<T, D, filtered<Table>, Dv> result;
  result.k = all.k;
  result.v = all.v;
  result.k_strides = all.k_strides;
  result.v_strides = all.v_strides;
  result.scales = all.scales;
  result.sequences = 1;
  result.kv_heads = all.kv_heads;
  result.lengths = counts;
  result.length_strides = {0, 1};
  result.positions = positions;
  result.position_begin = begins;
  result.order = slot_order::ascending;  // as the slots do
  result.table = {all.table, slots, begins, all.kv_heads};
  return result;
}

/// Ascending slots by kv_head, of one layer of one sequence. They grow at the end; K and V are not copied.
class candidates {
 public:
  index_t count(index_t head) const { return counts_[std::size_t(head)]; }
  const host_vector<index_t>& counts() const { return counts_; }
  const index_t* row(index_t head) const { return slots_.data() + begins_[std::size_t(head)]; }

  void assign(const selection& chosen) {
    host_vector<offset_t> begins{0};
    host_vector<index_t> slots, counts = chosen.counts;
    for (index_t h = 0; h < chosen.rows(); ++h) {
      slots.insert(slots.end(), chosen.row(h), chosen.row(h) + chosen.counts[std::size_t(h)]);
      begins.push_back(offset_t(slots.size()));
    }
    slots.shrink_to_fit();
    begins_ = std::move(begins);
    counts_ = std::move(counts);
    slots_ = std::move(slots);
  }
  /// Makes every slot of heads of these lengths a candidate.
  void assign_all(const host_vector<index_t>& lengths) {
    selection all;
    all.reset(lengths);
    all.counts = lengths;
    for (index_t h = 0; h < all.rows(); ++h) std::iota(all.row(h), all.row(h) + lengths[std::size_t(h)], 0);
    assign(all);
  }
  /// The chosen slots of a view, and their positions where those differ.
  template <class View>
  void assign(const selection& chosen, const View& all) {
    assign(chosen);
    positions_.clear();
    if (!all.positions) return;
    for (index_t h = 0; h < chosen.rows(); ++h) {
      for (index_t i = 0; i < count(h); ++i) positions_.push_back(all.position(0, h, row(h)[i]));
    }
  }

  /// Saves the candidates of heads of these lengths, or loads them.
  template <class Archive>
  void transfer(const host_vector<index_t>& lengths, Archive& archive) {
    host_vector<index_t> counts = counts_;
    counts.resize(lengths.size());
    archive.rows(counts.data(), counts.size());
    selection loaded;
    for (std::size_t h = 0; h < counts.size(); ++h)
      archive.require(counts[h] >= 0 && counts[h] <= lengths[h], "with more candidates than tokens");
    if constexpr (Archive::loads) loaded.reset(counts), loaded.counts = counts;
    for (std::size_t h = 0; h < counts.size(); ++h) {
      index_t* const row = Archive::loads ? loaded.row(index_t(h)) : slots_.data() + begins_[h];
      transfer_ascending(row, counts[h], lengths[h], archive);
    }
    if constexpr (Archive::loads) assign(loaded);
  }

  /// Removes all slots and releases their memory.
  void clear() {
    std::fill(begins_.begin(), begins_.end(), 0);
    std::fill(counts_.begin(), counts_.end(), 0);
    host_vector<index_t>().swap(slots_);
  }
  /// Removes slots that heads of these lengths do not have.
  void abandon(const host_vector<index_t>& lengths) {
    for (std::size_t h = 0; h < counts_.size(); ++h) {
      while (counts_[h] > 0 && slots_[std::size_t(begins_[h] + counts_[h] - 1)] >= lengths[h]) --counts_[h];
    }
  }

  /// Adds the newest `tokens` slots of heads of these lengths.
  void append(const host_vector<index_t>& lengths, index_t tokens) {
    bool fits = true;
    for (std::size_t h = 0; h < counts_.size(); ++h) fits &= counts_[h] + tokens <= begins_[h + 1] - begins_[h];
    if (!fits) grow(tokens);
    for (std::size_t h = 0; h < counts_.size(); ++h) {
      for (index_t t = 0; t < tokens; ++t) {
        slots_[std::size_t(begins_[h] + counts_[h]++)] = lengths[h] - tokens + t;
      }
    }
  }

  /// A view of the candidates alone, over a view of everything. Valid until either changes.
  template <class View>
  auto view(const View& all) const {
    return view_of_slots(all, slots_.data(), begins_.data(), counts_.data(),
                         all.positions ? positions_.data() : slots_.data());
  }

  offset_t bytes() const { return offset_t(slots_.capacity() * sizeof(index_t)); }

 private:
  void grow(index_t tokens) {
    host_vector<offset_t> begins{0};
    for (const index_t count : counts_) {
      const index_t length = count + tokens;
      begins.push_back(begins.back() + length + spare_room(length));
    }
    host_vector<index_t> slots(std::size_t(begins.back()), no_index);
    for (std::size_t h = 0; h < counts_.size(); ++h) {
      std::copy_n(slots_.begin() + begins_[h], counts_[h], slots.begin() + begins[h]);
    }
    begins_ = std::move(begins);
    slots_ = std::move(slots);
  }

  host_vector<offset_t> begins_{0};  // by head, and the end
  host_vector<index_t> counts_;
  host_vector<index_t> slots_;
  host_vector<index_t> positions_;  // where they differ from slots
};

}  // namespace cpu
TESSERA_NAMESPACE_END
