// An owned layer_scores for budgets and selectors.
#pragma once

#include <limits>
#include <vector>

#include <tessera/concepts/budget.hpp>

namespace support {

/// Scores by head, with gaps of NaN between the heads that nobody may read.
struct owned_scores {
  std::vector<tessera::index_t> tokens;
  std::vector<tessera::offset_t> offsets;
  std::vector<float> values;

  explicit owned_scores(const std::vector<std::vector<float>>& heads) {
    for (const auto& head : heads) {
      tokens.push_back(tessera::index_t(head.size()));
      offsets.push_back(tessera::offset_t(values.size()));
      values.insert(values.end(), head.begin(), head.end());
      values.insert(values.end(), 3, std::numeric_limits<float>::quiet_NaN());
    }
  }

  tessera::layer_scores view(tessera::index_t tail, tessera::index_t layer = 0, tessera::index_t layers = 1) const {
    tessera::layer_scores scores;
    scores.layer = layer;
    scores.layers = layers;
    scores.kv_heads = tessera::index_t(tokens.size());
    scores.protected_tail = tail;
    scores.tokens = tokens.data();
    scores.offsets = offsets.data();
    scores.scores = values.data();
    return scores;
  }
};

template <class Budget>
std::vector<tessera::index_t> counts(const Budget& budget, const tessera::layer_scores& scores) {
  std::vector<tessera::index_t> result(std::size_t(scores.kv_heads), -9);
  tessera::allot_counts(budget, scores, result.data());
  return result;
}

}  // namespace support
