// Methods whose scores an engine gives, and such scores.
#pragma once

#include <vector>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/each_chunk.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/given_scores.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "support/random.hpp"

namespace gated {

using namespace tessera;

constexpr int dim = 64;
constexpr index_t q_heads = 4, kv_heads = 2, layers = 2;

template <class T>
struct at_the_end : recipe<retain<given_scores, uniform, top_tokens>, dense<T, dim>, retrieve_all, dense_decode, once> {
  static constexpr const char* name = "gated";
};
template <class T>
struct by_chunks
    : recipe<retain<given_scores, calibrated, top_tokens>, dense<T, dim>, retrieve_all, dense_decode, each_chunk> {
  static constexpr const char* name = "gated_chunks";
};

/// Scores of a layer's tokens, [kv_heads, tokens], the same for the same positions. Some are equal.
inline std::vector<float> scores_of(index_t layer, index_t first, index_t tokens) {
  std::vector<float> scores;
  for (index_t h = 0; h < kv_heads; ++h) {
    for (index_t t = first; t < first + tokens; ++t) {
      support::rng random(std::uint64_t(t) * 16 + std::uint64_t(layer * 4 + h));
      scores.push_back(float(random.between(0, 500)));
    }
  }
  return scores;
}

}  // namespace gated
