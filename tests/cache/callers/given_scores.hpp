// Scores for caches whose method takes them from the engine, by position: however a test calls a cache, they are there
// when it chooses.
#pragma once

#include <vector>

#include <tessera/core/error.hpp>

#include "support/random.hpp"

namespace support {

/// The score of a token, the same in every conversation. Some are equal.
inline float given_score(tessera::index_t layer, tessera::index_t head, tessera::index_t position) {
  rng random(std::uint64_t(position) * 1024 + std::uint64_t(layer * 32 + head));
  return float(random.between(0, 500));
}

/// Calls set(tokens, scores) with the scores [kv_heads, tokens] of all tokens of a layer, where the recipe takes some.
/// A cache that cannot take them now gets none: what is called then says what is wrong.
template <class Recipe, class Cache, class Set>
void give_scores(const Cache& held, tessera::index_t layer, tessera::index_t id, const Set& set) {
  if constexpr (Recipe::retain_type::takes_scores) {
    try {
      const auto stored = held.positions(layer, id, 0);
      const tessera::index_t tokens = stored.empty() ? 0 : stored.back() + 1;
      std::vector<float> scores;
      for (tessera::index_t h = 0; h < held.shape().kv_heads; ++h) {
        for (tessera::index_t t = 0; t < tokens; ++t) scores.push_back(given_score(layer, h, t));
      }
      set(tokens, scores);
    } catch (const tessera::error&) {
    }
  }
}
/// All layers' to a cache on the host.
template <class Recipe, class Cache>
void give_scores(Cache& held, tessera::index_t layer, tessera::index_t id) {
  give_scores<Recipe>(held, layer, id, [&](tessera::index_t tokens, const std::vector<float>& scores) {
    if constexpr (Recipe::retain_type::takes_scores) held.set_scores(layer, id, 0, tokens, scores.data());
  });
}
template <class Recipe, class Cache>
void give_scores(Cache& held, tessera::index_t id) {
  for (tessera::index_t layer = 0; layer < held.shape().layers; ++layer) give_scores<Recipe>(held, layer, id);
}

}  // namespace support
