// Random queries, keys and values of one sequence, and attention over any of its tokens in double.
#pragma once

#include "any_cache.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/shrink/shrink_shape.hpp"

namespace methods_test {

namespace oracle = support::oracle;
using support::rng;

/// The tokens of one sequence in all layers: q, k, v [layers, tokens, heads, dim].
struct model_data {
  tessera::model_shape shape;
  index_t tokens = 0;
  std::vector<float> q, k, v;

  /// With `distinct` > 0 the keys are copies of few rows: many tokens then tie exactly.
  model_data(rng& random, const tessera::model_shape& shape_, index_t tokens_, index_t distinct = 0)
      : shape(shape_), tokens(tokens_) {
    const index_t rows = shape.layers * tokens * shape.kv_heads;
    q = support::normals(random, std::size_t(shape.layers * tokens * shape.q_heads * dim), 1.5f);
    k = distinct > 0 ? support::repeated_rows(random, rows, dim, distinct)
                     : support::normals(random, std::size_t(rows * dim));
    v = support::normals(random, std::size_t(rows * dim));
  }

  /// The rows of some layers and heads of `whole` alone.
  model_data(const model_data& whole, const support::shape_parts& parts)
      : shape(parts.shape(whole.shape)), tokens(whole.tokens) {
    const auto add = [](std::vector<float>& to, const float* row) { to.insert(to.end(), row, row + dim); };
    for (const index_t layer : parts.layers) {
      for (index_t token = 0; token < tokens; ++token) {
        for (const index_t head : parts.kv_heads) {
          add(k, whole.key(layer, token, head));
          add(v, whole.value(layer, token, head));
          for (const index_t member : parts.members) add(q, whole.query(layer, token, head * whole.group() + member));
        }
      }
    }
  }

  index_t group() const { return shape.q_heads / shape.kv_heads; }
  const float* query(index_t layer, index_t token, index_t head) const {
    return q.data() + ((offset_t(layer) * tokens + token) * shape.q_heads + head) * dim;
  }
  const float* key(index_t layer, index_t token, index_t head) const {
    return k.data() + ((offset_t(layer) * tokens + token) * shape.kv_heads + head) * dim;
  }
  const float* value(index_t layer, index_t token, index_t head) const {
    return v.data() + ((offset_t(layer) * tokens + token) * shape.kv_heads + head) * dim;
  }

  any_cache::rows queries(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(query(layer, first, 0), count, shape.q_heads, dim);
  }
  any_cache::rows keys(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(key(layer, first, 0), count, shape.kv_heads, dim);
  }
  any_cache::rows values(index_t layer, index_t first, index_t count) const {
    return tessera::nhd_rows(value(layer, first, 0), count, shape.kv_heads, dim);
  }

  oracle::attended attend(const tessera::logit_rule& rule, index_t layer, index_t token, index_t q_head,
                          const std::vector<index_t>& positions) const {
    std::vector<const float*> keys, values;
    for (const index_t position : positions) {
      keys.push_back(key(layer, position, q_head / group()));
      values.push_back(value(layer, position, q_head / group()));
    }
    return oracle::attend(query(layer, token, q_head), token, keys, values, positions, dim, dim, rule, q_head);
  }
};

}  // namespace methods_test
