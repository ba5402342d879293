// Conversations with caches of ragged pages.
#pragma once

#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/methods/tangram.hpp>

#include "support/random.hpp"

namespace ragged_talk {

using namespace tessera;
using support::rng;

constexpr int dim = 64;
using over_runs = tangram<fp32, dim, dim, dense<fp32, dim>>;
using over_pages = tangram<fp32, dim, dim, stored<dense_rows<fp32, dim>, ragged_pages>>;

struct text {
  model_shape shape;
  index_t tokens;
  std::vector<float> q, k;  // [layers, tokens, heads, dim]

  text(rng& random, const model_shape& of, index_t count) : shape(of), tokens(count) {
    q = support::normals(random, std::size_t(of.layers * count * of.q_heads * dim), 1.5f);
    k = support::normals(random, std::size_t(of.layers * count * of.kv_heads * dim));
  }
  rows_view<const float> queries(index_t layer, index_t first, index_t count) const {
    return nhd_rows(q.data() + offset_t(layer * tokens + first) * shape.q_heads * dim, count, shape.q_heads, dim);
  }
  rows_view<const float> keys(index_t layer, index_t first, index_t count) const {
    return nhd_rows(k.data() + offset_t(layer * tokens + first) * shape.kv_heads * dim, count, shape.kv_heads, dim);
  }
  template <class Cache>
  void prefill(Cache& kv, index_t layer, index_t id, index_t first, index_t count) const {
    kv.prefill(layer, id, queries(layer, first, count), keys(layer, first, count), keys(layer, first, count));
  }
  template <class Cache>
  void prefill(Cache& kv, index_t id, index_t first, index_t count) const {
    for (index_t layer = 0; layer < shape.layers; ++layer) prefill(kv, layer, id, first, count);
  }
  template <class Cache>
  std::vector<float> step(Cache& kv, index_t id, index_t next, index_t count) const {
    const std::size_t rows = std::size_t(shape.layers * shape.q_heads * count);
    std::vector<float> out(rows * (dim + 1));
    const batch now = kv.prepare_step({id}, count);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const offset_t at = offset_t(layer) * shape.q_heads * count;
      kv.decode(layer, now, queries(layer, next, count), keys(layer, next, count), keys(layer, next, count),
                nhd_rows(out.data() + at * dim, count, shape.q_heads, dim),
                nhd_rows(out.data() + rows * dim + at, count, shape.q_heads, 1));
    }
    return out;
  }
};

inline std::shared_ptr<cpu::executor> one_thread() { return std::make_shared<cpu::executor>(1); }

inline std::vector<double> random_shares(rng& random, index_t count) {
  std::vector<double> shares;
  for (index_t i = 0; i < count; ++i) shares.push_back(random.chance(0.1) ? 1.0 : 0.02 + 0.5 * random.uniform());
  return shares;
}

template <class Recipe>
Recipe recipe_of(const std::vector<double>& shares, const model_shape& shape, index_t window, index_t chunk) {
  Recipe recipe;
  recipe.retain.scorer.window = window;
  recipe.retain.budget.shares = {shares.data(), shape.layers, shape.kv_heads};
  recipe.schedule.chunk = chunk;
  return recipe;
}

inline index_t total(const std::vector<index_t>& pages) {
  index_t sum = 0;
  for (const index_t one : pages) sum += one;
  return sum;
}

}  // namespace ragged_talk
