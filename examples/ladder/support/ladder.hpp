// What the rungs share: made-up tensors, the largest difference of two of them, and checks that speak.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include <tessera/core/views.hpp>

namespace ladder {

using tessera::index_t;

/// Queries, keys and values that stand for a model's. [tokens, heads, dim], keys and queries after RoPE.
struct tensors {
  index_t tokens, q_heads, kv_heads, dim;
  std::vector<float> q, k, v;

  tensors(index_t tokens_, index_t q_heads_, index_t kv_heads_, index_t dim_, unsigned seed = 1)
      : tokens(tokens_),
        q_heads(q_heads_),
        kv_heads(kv_heads_),
        dim(dim_),
        q(std::size_t(tokens_ * q_heads_ * dim_)),
        k(std::size_t(tokens_ * kv_heads_ * dim_)),
        v(k.size()) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> normal;
    for (auto* tensor : {&q, &k, &v}) {
      for (float& x : *tensor) x = normal(bits);
    }
  }

  /// Tokens [first, first + count) of each tensor.
  auto queries(index_t first, index_t count) const { return rows(q, first, count, q_heads); }
  auto keys(index_t first, index_t count) const { return rows(k, first, count, kv_heads); }
  auto values(index_t first, index_t count) const { return rows(v, first, count, kv_heads); }

 private:
  tessera::rows_view<const float> rows(const std::vector<float>& x, index_t first, index_t count, index_t heads) const {
    return tessera::nhd_rows(x.data() + tessera::offset_t(first) * heads * dim, count, heads, dim);
  }
};

inline float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = a.size() == b.size() ? 0.0f : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::abs(a[i] - b[i]);
    largest = std::isnan(difference) ? INFINITY : std::max(largest, difference);
  }
  return largest;
}

/// Prints a sentence and whether it held.
class checks {
 public:
  void operator()(bool holds, const char* sentence) {
    std::printf("%s  %s\n", holds ? "ok   " : "WRONG", sentence);
    failed_ |= !holds;
  }
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  bool failed_ = false;
};

}  // namespace ladder
