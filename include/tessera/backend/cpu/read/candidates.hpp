// Which slots a turn's steps may read, for every kv_head: what a filter let through, and what was decoded since.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../core/selection.hpp"
#include "../../../core/views.hpp"
#include "../store/columns.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Ascending slot lists by kv_head, of one layer and one sequence, that grow at their ends. Of K and V nothing is copied.
class candidates {
 public:
  index_t count(index_t head) const { return counts_[std::size_t(head)]; }
  const index_t* row(index_t head) const { return slots_.data() + begins_[std::size_t(head)]; }

  void assign(const selection& passed) {
    begins_.assign(1, 0);
    std::vector<index_t> fresh;
    for (index_t h = 0; h < passed.rows(); ++h) {
      fresh.insert(fresh.end(), passed.row(h), passed.row(h) + passed.counts[std::size_t(h)]);
      begins_.push_back(offset_t(fresh.size()));
    }
    counts_ = passed.counts;
    fresh.shrink_to_fit();
    slots_ = std::move(fresh);
  }

  /// Adds the newest `tokens` slots of heads that hold `lengths`.
  void append(const std::vector<index_t>& lengths, index_t tokens) {
    bool room = true;
    for (std::size_t h = 0; h < counts_.size(); ++h) room &= counts_[h] + tokens <= begins_[h + 1] - begins_[h];
    if (!room) grow(tokens);
    for (std::size_t h = 0; h < counts_.size(); ++h) {
      for (index_t t = 0; t < tokens; ++t) {
        slots_[std::size_t(begins_[h] + counts_[h]++)] = lengths[h] - tokens + t;
      }
    }
  }

  /// A view of the candidates alone over a view of everything, of which slots are positions. Valid until either changes.
  template <class T, int D, class Table, int Dv>
  kv_view<T, D, filtered<Table>, Dv> view(const kv_view<T, D, Table, Dv>& all) const {
    kv_view<T, D, filtered<Table>, Dv> result;
    result.k = all.k;
    result.v = all.v;
    result.k_strides = all.k_strides;
    result.v_strides = all.v_strides;
    result.scales = all.scales;
    result.sequences = 1;
    result.kv_heads = all.kv_heads;
    result.lengths = counts_.data();
    result.length_strides = {0, 1};
    result.positions = slots_.data();
    result.position_begin = begins_.data();
    result.scales = all.scales;
    result.table = {all.table, slots_.data(), begins_.data(), all.kv_heads};
    return result;
  }

  offset_t bytes() const { return offset_t(slots_.capacity() * sizeof(index_t)); }

 private:
  void grow(index_t tokens) {
    std::vector<offset_t> begins{0};
    for (const index_t count : counts_) {
      const index_t length = count + tokens;
      begins.push_back(begins.back() + length + spare_room(length));
    }
    std::vector<index_t> fresh(std::size_t(begins.back()), no_index);
    for (std::size_t h = 0; h < counts_.size(); ++h) {
      std::copy_n(slots_.begin() + begins_[h], counts_[h], fresh.begin() + begins[h]);
    }
    begins_ = std::move(begins);
    slots_ = std::move(fresh);
  }

  std::vector<offset_t> begins_{0};  // by head, and the end
  std::vector<index_t> counts_;
  std::vector<index_t> slots_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
