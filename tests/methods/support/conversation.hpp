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

template <class Cache>
void prefill(Cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
  for (index_t layer = 0; layer < data.shape.layers; ++layer) {
    cache.prefill(layer, id, data.queries(layer, first, count), data.keys(layer, first, count),
                  data.values(layer, first, count));
  }
}

/// Outputs and log-sum-exps of one step in all layers, one after another.
template <class Cache>
std::vector<float> decode(Cache& cache, index_t id, const model_data& data, index_t first, index_t count) {
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

/// Prompts of several turns with steps of one and of several tokens; `compare_results(results, others)`. The first
/// cache's sequence has `options`.
template <class Cache, class Compare>
void hold_the_same_conversation(Cache& cache, const model_data& data, any_cache& other, const model_data& other_data,
                                Compare&& compare_results, const tessera::sequence_options& options = {}) {
  const index_t id = cache.open(options);
  REQUIRE(other.open() == id);
  cache.trace_attended(true);
  other.trace_attended(true);
  const auto same_sets = [&] {
    for (index_t layer = 0; layer < data.shape.layers; ++layer) {
      for (index_t head = 0; head < data.shape.kv_heads; ++head) {
        CAPTURE(layer, head);
        REQUIRE(cache.positions(layer, id, head) == other.positions(layer, id, head));
        REQUIRE(cache.readable(layer, id, head) == other.readable(layer, id, head));
      }
    }
  };
  index_t next = 0;
  for (const turn& now : {turn{150, {1, 1, 3}}, turn{20, {1, 8}}, turn{1, {2}}}) {
    prefill(cache, id, data, next, now.prompt);
    prefill(other, id, other_data, next, now.prompt);
    next += now.prompt;
    cache.end_prefill(id);
    other.end_prefill(id);
    same_sets();
    for (const index_t count : now.steps) {
      const auto results = decode(cache, id, data, next, count);
      compare_results(results, decode(other, id, other_data, next, count));
      for (index_t layer = 0; layer < data.shape.layers; ++layer) {
        REQUIRE(cache.attended(layer, id) == other.attended(layer, id));
      }
      next += count;
      same_sets();
    }
  }
}

}  // namespace methods_test
