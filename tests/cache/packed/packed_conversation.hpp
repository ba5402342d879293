// A conversation with a cache of packed rows, and the parts in which its rows lie.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/mosaickv.hpp>

#include "support/random.hpp"

namespace packed_conversation {

using namespace tessera;

constexpr index_t q_heads = 4, kv_heads = 2;

/// One layer and one sequence, fed with random rows.
template <class Recipe>
struct conversation {
  static constexpr int dim = Recipe::layout_type::k_dim;
  support::rng random{405};
  cache<Recipe> held;
  index_t id;
  std::vector<float> out, lse, q;

  explicit conversation(const Recipe& recipe)
      : held({1, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1)), id(held.open()) {
    held.trace_attended(true);
  }
  void prompt(index_t tokens, float poison = 0) {
    chunk(tokens, poison);
    held.end_prefill(id);
  }
  void chunk(index_t tokens, float poison = 0) {
    auto k = support::normals(random, std::size_t(tokens * kv_heads * dim)), v = support::normals(random, k.size());
    q = support::normals(random, std::size_t(tokens * q_heads * dim));
    k[k.size() / 2] += poison;
    held.prefill(0, id, nhd_rows<const float>(q.data(), tokens, q_heads, dim),
                 nhd_rows<const float>(k.data(), tokens, kv_heads, dim),
                 nhd_rows<const float>(v.data(), tokens, kv_heads, dim));
  }
  void step(index_t tokens) {
    const auto k = support::normals(random, std::size_t(tokens * kv_heads * dim)),
               v = support::normals(random, k.size());
    q = support::normals(random, std::size_t(tokens * q_heads * dim));
    out.assign(q.size(), 7.0f);
    lse.assign(std::size_t(tokens * q_heads), 7.0f);
    const batch now = held.prepare_step({id}, tokens);
    held.decode(0, now, nhd_rows<const float>(q.data(), tokens, q_heads, dim),
                nhd_rows<const float>(k.data(), tokens, kv_heads, dim),
                nhd_rows<const float>(v.data(), tokens, kv_heads, dim), nhd_rows(out.data(), tokens, q_heads, dim),
                nhd_rows(lse.data(), tokens, q_heads, 1));
  }
  /// Rows of each segment of head 0, and the whole ones behind them.
  std::vector<index_t> parts() {
    const auto view = held.view(0, id);
    std::vector<index_t> result;
    for (const auto& segment : *view.segments) result.push_back(segment->lengths[0]);
    result.push_back(view.whole.length(0, 0));
    return result;
  }
};

using list = std::vector<index_t>;

template <class Recipe>
std::string refused(const Recipe& recipe) {
  try {
    cache<Recipe>({1, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1));
  } catch (const error& refusal) {
    return refusal.what();
  }
  return "nothing was thrown";
}

using mosaic = mosaickv<fp32, 64>;
inline mosaic of_short_segments(index_t rows) {
  mosaic recipe;
  recipe.layout.rows.segment = rows;
  return recipe;
}

}  // namespace packed_conversation
