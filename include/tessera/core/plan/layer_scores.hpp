// The scores of one layer and one sequence, as budgets and selectors see them.
#pragma once

#include "../config.hpp"
#include "../types.hpp"
#include "layer_extent.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scores of every stored slot by kv_head, higher is kept first.
/// Shapes   head h has `tokens[h]` slots; their scores begin at `scores + offsets[h]`. The newest `protected_tail`
///          slots of each head are kept whatever their score.
struct layer_scores {
  index_t layer = 0;
  index_t layers = 1;
  index_t kv_heads = 0;
  index_t protected_tail = 0;
  const index_t* tokens = nullptr;
  const offset_t* offsets = nullptr;
  const float* scores = nullptr;
  const index_t* settled = nullptr;  ///< [kv_heads], first slots of each head that stay and do not compete; null: none
  const index_t* earlier = nullptr;  ///< [kv_heads], of those the ones of earlier turns; goes with `settled`
  index_t prompt_tokens = 0;         ///< tokens of this turn's prompt so far; goes with `settled`

  const float* head(index_t h) const { return scores + offsets[h]; }
  /// Slots of head `h` before its protected tail: those that compete by score, behind the settled ones.
  index_t candidates(index_t h) const { return tokens[h] > protected_tail ? tokens[h] - protected_tail : 0; }
  index_t settled_of(index_t h) const { return settled ? settled[h] : 0; }
  /// A head as budgets by lengths see it.
  head_extent extent(index_t h) const {
    const index_t old = settled ? earlier[h] : 0;
    const index_t dropped = settled ? prompt_tokens - (tokens[h] - old) : 0;
    return {layer, layers, h, kv_heads, protected_tail, tokens[h], old, dropped};
  }
};

TESSERA_NAMESPACE_END
