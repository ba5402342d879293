// Bounds of the keys in pages of consecutive cells of llama.cpp's memory, one layer: what `quest` chooses by.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include <tessera/backend/cpu/kernel/lanes.hpp>
#include <tessera/core/stored/page_extrema.hpp>

#include "step_node.hpp"

namespace tessera_plugin {

/// Smallest and largest values by channel of every page of cells, [pages, kv_heads, 2, dim]. A page has the cells of
/// any sequences, also those that a row does not see: its bounds hold for each of them. Cells are counted from the
/// begin of the layer's memory.
///
/// `written` says that a cell has changed, and its page is computed anew when a row sees it next. Cells that change in
/// another way, as by llama_state_seq_set_data, are not said: `matches` finds them out.
class cell_bounds {
 public:
  using fp16 = tessera::fp16;

  /// Sets what the node shows. A layer of another shape begins anew.
  void describe(const step_node& node, index_t page) {
    const ggml_tensor* const root = root_of(node.k);
    const index_t cells = index_t(std::size_t(ggml_nbytes(root)) / node.k->nb[1]);
    if (dim_ == node.dim() && kv_heads_ == node.kv_heads() && page_ == page && cells_ == cells) return;
    dim_ = node.dim(), kv_heads_ = node.kv_heads(), page_ = page, cells_ = cells;
    const std::size_t pages = std::size_t(tessera::ceil_div(cells, page));
    data_.assign(pages * std::size_t(kv_heads_) * 2 * std::size_t(dim_), fp16(0.0f));
    is_known_.assign(pages, 0);
  }
  void written(std::int64_t cell) {
    if (page_ > 0 && cell / page_ < std::int64_t(is_known_.size())) is_known_[std::size_t(cell / page_)] = 0;
  }
  void forget() { std::fill(is_known_.begin(), is_known_.end(), 0); }

  /// The cell of a stream's first one, from the begin of the layer's memory on.
  static offset_t first_cell(const step_node& node, index_t stream) {
    return (node.key(stream, 0, 0) - static_cast<const char*>(root_of(node.k)->data)) / offset_t(node.k->nb[1]);
  }

  /// The bounds of a page, computed where they are not known.
  const fp16* of(const step_node& node, offset_t number, index_t head) {
    if (!is_known_[std::size_t(number)]) {
      for (index_t h = 0; h < kv_heads_; ++h) compute(node, number, h, row(number, h));
      is_known_[std::size_t(number)] = 1;
    }
    return row(number, head);
  }
  /// Whether the bounds of a page of one head are those of its cells.
  bool matches(const step_node& node, offset_t number, index_t head) {
    fresh_.resize(std::size_t(2 * dim_));
    compute(node, number, head, fresh_.data());
    return std::memcmp(fresh_.data(), row(number, head), fresh_.size() * sizeof(fp16)) == 0;
  }
  offset_t bytes() const { return offset_t(data_.size() * sizeof(fp16) + is_known_.size()); }

 private:
  fp16* row(offset_t number, index_t head) { return data_.data() + (number * kv_heads_ + head) * 2 * dim_; }

  void compute(const step_node& node, offset_t number, index_t head, fp16* bounds) {
    constexpr float none = std::numeric_limits<float>::quiet_NaN();
    lower_.assign(std::size_t(dim_), none), upper_.assign(std::size_t(dim_), none);
    const char* const begin = static_cast<const char*>(root_of(node.k)->data) + head * node.k->nb[2];
    for (offset_t cell = number * page_; cell < std::min<offset_t>(cells_, (number + 1) * page_); ++cell) {
      const fp16* const key = reinterpret_cast<const fp16*>(begin + cell * offset_t(node.k->nb[1]));
      for (index_t d = 0; d < dim_; d += tessera::cpu::lane_count) {
        float values[tessera::cpu::lane_count];
        tessera::cpu::store(values, tessera::cpu::load(key + d));
        for (index_t i = 0; i < tessera::cpu::lane_count; ++i) {
          float &low = lower_[std::size_t(d + i)], &high = upper_[std::size_t(d + i)];
          low = tessera::lower_with(low, values[i]), high = tessera::upper_with(high, values[i]);
        }
      }
    }
    for (index_t d = 0; d < dim_; ++d)
      bounds[d] = fp16(lower_[std::size_t(d)]), bounds[dim_ + d] = fp16(upper_[std::size_t(d)]);
  }

  index_t dim_ = 0, kv_heads_ = 0, page_ = 0, cells_ = 0;
  std::vector<fp16> data_, fresh_;
  std::vector<char> is_known_;
  std::vector<float> lower_, upper_;
};

/// The queries of a group against bounds: the sum over query heads of the largest product that a key of the page could
/// have.
class bound_query {
 public:
  /// `row(head)`: a query head's elements.
  template <class Row>
  void read(index_t dim, index_t group, const Row& row) {
    weights_.assign(std::size_t(2 * dim), 0.0f);
    for (index_t m = 0; m < group; ++m) {
      const float* const q = row(m);
      for (index_t d = 0; d < dim; ++d) weights_[std::size_t(q[d] > 0 ? dim + d : d)] += q[d];
    }
  }
  float bound(const tessera::fp16* bounds) const {
    tessera::cpu::lanes sum{};
    for (std::size_t i = 0; i < weights_.size(); i += tessera::cpu::lane_count)
      sum += tessera::cpu::load(weights_.data() + i) * tessera::cpu::load(bounds + i);
    return tessera::cpu::sum(sum);
  }

 private:
  std::vector<float> weights_;  // [2, dim]: sums of what is below 0, and above
};

}  // namespace tessera_plugin
