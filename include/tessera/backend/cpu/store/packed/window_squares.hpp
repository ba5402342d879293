// Squares of a prompt's last queries by channel, kept until the prompt ends.
#pragma once

#include <algorithm>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Sums over a group's query heads of q^2 by channel, of the newest tokens of a prompt in any chunks. Squares that are
/// not finite are left out.
class window_squares {
 public:
  /// Allocates the memory that `add` needs.
  template <class E>
  void reserve(const rows_view<const E>& q, index_t kv_heads, index_t dim, index_t capacity) {
    const offset_t row = offset_t(kv_heads) * dim, added = std::clamp(q.tokens, 0, capacity);
    rows_.reserve(std::size_t((old_rows(row, added, capacity) + added) * row));
  }
  /// Adds the queries of a chunk's last tokens. The newest `capacity` tokens are kept.
  template <class E>
  void add(const rows_view<const E>& q, index_t kv_heads, index_t dim, index_t capacity) {
    if (q.tokens <= 0) return;
    const index_t group = q.heads / kv_heads, added = (std::min)(q.tokens, capacity);
    const offset_t row = offset_t(kv_heads) * dim;
    rows_.erase(rows_.begin(), rows_.end() - old_rows(row, added, capacity) * row);
    heads_ = group;
    for (index_t t = q.tokens - added; t < q.tokens; ++t) {
      for (index_t h = 0; h < kv_heads; ++h) {
        for (index_t d = 0; d < dim; ++d) {
          float sum = 0;
          for (index_t g = 0; g < group; ++g) {
            const float x = float(q.row(0, t, h * group + g)[d]);
            const float square = x * x;
            if (square < infinity) sum += square;
          }
          rows_.push_back(sum);
        }
      }
    }
  }

  /// Means over tokens and heads, [kv_heads, dim]; empty without queries.
  host_vector<double> means(index_t kv_heads, index_t dim) const {
    const std::size_t row = std::size_t(kv_heads) * std::size_t(dim);
    if (rows_.empty()) return {};
    host_vector<double> result(row, 0.0);
    for (std::size_t i = 0; i < rows_.size(); ++i) result[i % row] += double(rows_[i]);
    for (double& x : result) x /= double(rows_.size() / row) * double(heads_);
    return result;
  }

  offset_t bytes() const { return offset_t(rows_.capacity() * sizeof(float)); }

 private:
  /// Rows that stay when `added` come.
  offset_t old_rows(offset_t row, offset_t added, offset_t capacity) const {
    return (std::min<offset_t>)(capacity - added, offset_t(rows_.size()) / row);
  }

  host_vector<float> rows_;  // [tokens, kv_heads, dim]
  index_t heads_ = 1;        // of a group
};

}  // namespace cpu
TESSERA_NAMESPACE_END
