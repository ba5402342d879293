// What a prompt's last queries say of channels: their squares, until the prompt ends.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../../core/views.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The sum over a group's query heads of q^2 by channel, of the newest tokens of a prompt, in any chunks.
class window_squares {
 public:
  /// Takes in the queries of a chunk's last tokens; `most` of all tokens so far are remembered. As before when memory runs out.
  template <int D, class E>
  void add(const rows_view<const E>& q, index_t kv_heads, index_t most) {
    if (q.tokens <= 0) return;
    const index_t group = q.heads / kv_heads, fresh = std::min(q.tokens, most);
    const offset_t row = offset_t(kv_heads) * D, old = std::min<offset_t>(most - fresh, offset_t(rows_.size()) / row);
    rows_.reserve(std::size_t((old + fresh) * row));
    rows_.erase(rows_.begin(), rows_.end() - old * row);
    heads_ = group;
    for (index_t t = q.tokens - fresh; t < q.tokens; ++t) {
      for (index_t h = 0; h < kv_heads; ++h) {
        for (int d = 0; d < D; ++d) {
          float sum = 0;
          for (index_t g = 0; g < group; ++g) {
            const float x = float(q.row(0, t, h * group + g)[d]);
            sum += x * x;
          }
          rows_.push_back(sum);
        }
      }
    }
  }

  /// Their means over tokens and heads, [kv_heads, dim]; empty where no query has come.
  std::vector<double> means(index_t kv_heads, index_t dim) const {
    const std::size_t row = std::size_t(kv_heads) * std::size_t(dim);
    if (rows_.empty()) return {};
    std::vector<double> result(row, 0.0);
    for (std::size_t i = 0; i < rows_.size(); ++i) result[i % row] += double(rows_[i]);
    for (double& x : result) x /= double(rows_.size() / row) * double(heads_);
    return result;
  }

  offset_t bytes() const { return offset_t(rows_.capacity() * sizeof(float)); }

 private:
  std::vector<float> rows_;  // [tokens, kv_heads, dim]
  index_t heads_ = 1;        // of a group
};

}  // namespace cpu
TESSERA_NAMESPACE_END
