// The scores of one layer and one sequence, as budgets and selectors see them.
#pragma once

#include "config.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores of every stored slot by kv_head, higher is kept first.
/// Shapes   head h has `tokens[h]` slots; their scores begin at `scores + offsets[h]`. The newest `protected_tail`
/// slots
///          of each head are kept whatever their score.
struct layer_scores {
  index_t layer = 0;
  index_t layers = 1;
  index_t kv_heads = 0;
  index_t protected_tail = 0;
  const index_t* tokens = nullptr;
  const offset_t* offsets = nullptr;
  const float* scores = nullptr;

  const float* head(index_t h) const { return scores + offsets[h]; }
  /// Slots of head `h` that compete by score.
  index_t candidates(index_t h) const { return tokens[h] > protected_tail ? tokens[h] - protected_tail : 0; }
};

TESSERA_NAMESPACE_END
