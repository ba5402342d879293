// A method over another layout beside the same method over plain rows, through a conversation of several turns.
#pragma once

#include "conversation.hpp"
#include "entry_of.hpp"

namespace methods_test {

inline const tessera::model_shape layout_shape{2, 6, 3};

/// Prompts of several turns with steps of one and of several tokens; `compare(first token of the step, results, others)`.
template <class Compare>
void hold_the_same_conversation(any_cache& cache, const model_data& data, any_cache& other,
                                const model_data& other_data, Compare&& compare_results) {
  const index_t id = cache.open();
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

/// What all of them run with: small budgets, windows and pages, so that every stage has work to do.
inline settings small_settings(const std::string& method) {
  return {method, 40, {{"window", 8}, {"max_new", 30}, {"recent", 10}}, {}};
}

}  // namespace methods_test
