// One conversation with a cache of a recipe: prompts that are attended, chunk by chunk, and steps.
#pragma once

#include <memory>
#include <vector>

#include <tessera/cache.hpp>

#include "support/conversation.hpp"

namespace methods_test {

using tessera::nhd_rows;

/// One sequence of a cache; prompts are attended too.
template <class Recipe>
struct talk {
  tessera::cache<Recipe> cache;
  const model_data& data;
  index_t id, next = 0;

  talk(const Recipe& recipe, const model_data& of)
      : cache(of.shape, recipe, std::make_shared<tessera::cpu::executor>(1)), data(of), id(cache.open()) {
    cache.trace_attended(true);
    cache.trace_lines(true);
  }
  /// Outputs and log-sum-exps of a chunk in one layer after another.
  struct rows {
    std::vector<float> out, lse;
  };
  std::vector<rows> chunk(index_t tokens) {
    std::vector<rows> all;
    for (index_t layer = 0; layer < data.shape.layers; ++layer) {
      cache.prefill(layer, id, data.queries(layer, next, tokens), data.keys(layer, next, tokens),
                    data.values(layer, next, tokens));
      rows& one = all.emplace_back();
      one.out.resize(std::size_t(tokens * data.shape.q_heads * dim));
      one.lse.resize(std::size_t(tokens * data.shape.q_heads));
      cache.prefill_attention(layer, id, data.queries(layer, next, tokens),
                              nhd_rows(one.out.data(), tokens, data.shape.q_heads, dim),
                              nhd_rows(one.lse.data(), tokens, data.shape.q_heads, 1));
    }
    next += tokens;
    return all;
  }
  void prompt(index_t tokens) {
    chunk(tokens);
    cache.end_prefill(id);
  }
  std::vector<float> step(index_t tokens) {
    std::vector<float> out(std::size_t(data.shape.layers * tokens * data.shape.q_heads * dim));
    const tessera::batch now = cache.prepare_step({id}, tokens);
    for (index_t layer = 0; layer < data.shape.layers; ++layer) {
      cache.decode(
          layer, now, data.queries(layer, next, tokens), data.keys(layer, next, tokens),
          data.values(layer, next, tokens),
          nhd_rows(out.data() + offset_t(layer) * tokens * data.shape.q_heads * dim, tokens, data.shape.q_heads, dim));
    }
    next += tokens;
    return out;
  }
};

}  // namespace methods_test
