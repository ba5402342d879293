// A conversation over random rows, held again and again.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <tessera/tessera.hpp>

#include "support/random.hpp"

namespace callers_test {

using namespace tessera;

/// Rows of one layer for a prompt and steps, and a conversation over them.
template <class Method>
class talk {
  using E = typename Method::layout_type::element_type;
  static constexpr int dim = Method::layout_type::k_dim;
  static constexpr index_t q_heads = 4, kv_heads = 2;

 public:
  index_t prompt, steps;

  /// All but the first channel of each value `scale` times as large as the keys.
  talk(index_t prompt_tokens, index_t step_count, float scale = 1) : prompt(prompt_tokens), steps(step_count) {
    support::rng random(4901);
    const std::size_t tokens = std::size_t(prompt + 9 * steps);
    for (const float x : support::normals(random, tokens * q_heads * dim)) q_.push_back(E(x));
    for (const float x : support::normals(random, tokens * kv_heads * dim)) k_.push_back(E(x));
    for (const E x : k_) v_.push_back(v_.size() % dim == 0 ? x : E(float(x) * scale));
  }
  cache<Method> made(std::shared_ptr<cpu::executor> workers) const {
    Method recipe;
    recipe.set_budget(64);
    model_shape shape{2, q_heads, kv_heads};
    for (int d = 0; d < dim / 2; ++d) shape.rope_frequencies.push_back(1 / float(1 + d));
    return {shape, recipe, std::move(workers)};
  }
  /// Every output, in order.
  std::vector<float> held(cache<Method>& kv) const {
    std::vector<float> all;
    const auto rows = [&](const std::vector<E>& of, index_t heads, index_t first, index_t count) {
      return nhd_rows<const E>(of.data() + offset_t(first) * heads * dim, count, heads, dim);
    };
    const auto out = [&](index_t count) {
      all.resize(all.size() + std::size_t(count * q_heads * dim));
      return nhd_rows(all.data() + all.size() - std::size_t(count * q_heads * dim), count, q_heads, dim);
    };
    const index_t id = kv.open();
    for (index_t layer = 0; layer < 2; ++layer) {
      kv.prefill(layer, id, rows(q_, q_heads, 0, prompt), rows(k_, kv_heads, 0, prompt), rows(v_, kv_heads, 0, prompt));
      kv.prefill_attention(layer, id, rows(q_, q_heads, 0, prompt), out(prompt));
    }
    kv.end_prefill(id);
    for (index_t i = 0, at = prompt; i < steps; ++i) {
      const index_t tokens = i % 2 ? 8 : 1;
      const batch now = kv.prepare_step({id}, tokens);
      for (index_t layer = 0; layer < 2; ++layer) {
        kv.decode(layer, now, rows(q_, q_heads, at, tokens), rows(k_, kv_heads, at, tokens),
                  rows(v_, kv_heads, at, tokens), out(tokens));
      }
      at += tokens;
    }
    kv.close(id);
    return all;
  }

 private:
  std::vector<E> q_, k_, v_;
};

}  // namespace callers_test
