// Turns of one sequence with a cache: prompts and decode steps in all layers.
#pragma once

#include <vector>

#include "model_data.hpp"
#include "support/tolerance.hpp"

namespace methods_test {

struct turn {
  index_t prompt;
  std::vector<index_t> steps{};   // tokens of each decode step
  std::vector<index_t> chunks{};  // the prompt's, for a cache that gets it in several
};

inline void prefill(any_cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    cache.prefill(layer, id, data.queries(layer, first, count), data.keys(layer, first, count),
                  data.values(layer, first, count));
  }
}

/// Outputs and log-sum-exps of one step in all layers, one after another.
inline std::vector<float> decode(any_cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
  const std::size_t rows = std::size_t(data.shape.layers * count * data.shape.q_heads);
  std::vector<float> results(rows * (dim + 1), 1e9f);
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    const offset_t at = offset_t(layer) * count * data.shape.q_heads;
    cache.decode(layer, {id}, data.queries(layer, first, count), data.keys(layer, first, count),
                 data.values(layer, first, count),
                 tessera::nhd_rows(results.data() + at * dim, count, data.shape.q_heads, dim),
                 tessera::nhd_rows(results.data() + rows * dim + at, count, data.shape.q_heads, 1));
  }
  return results;
}

}  // namespace methods_test
