// How many tokens every kv_head keeps under a budget that depends on lengths alone. A GPU's host computes these counts
// without a transfer.
#pragma once

#include <algorithm>
#include <utility>

#include "../concepts/budget.hpp"
#include "../core/host/host_vector.hpp"

TESSERA_NAMESPACE_BEGIN

/// Counts of a layer's heads during a turn's prompt; see prompt_reach.
struct settled_heads {
  host_vector<index_t> earlier;  ///< tokens from before the turn
  host_vector<index_t> settled;  ///< oldest tokens that stay without competing
};

/// The number of tokens that such a budget leaves each head of a layer. choose_kept has the same counts on both
/// backends.
/// Shapes   stored [kv_heads], tokens of each head.   `layer`: as the budget sees it; it has one head if all heads
///          choose together.
template <length_budget Budget>
kept_bound kept_by_lengths(const Budget& budget, const layer_extent& layer, host_vector<index_t> stored,
                           const settled_heads& before, index_t seen, index_t kv_heads) {
  kept_bound kept;
  const bool whole = keeps_all(budget, layer);
  for (index_t h = 0; h < kv_heads; ++h) {
    index_t& own = stored[std::size_t(h)];
    if (!whole) {
      head_extent head{layer.layer,    layer.layers,         layer.kv_heads > 1 ? h : 0,
                       layer.kv_heads, layer.protected_tail, own};
      head.earlier = before.earlier[std::size_t(h)];
      head.dropped = seen - (own - head.earlier);
      const index_t least = (std::min)(before.settled[std::size_t(h)] + layer.protected_tail, own);
      own = std::clamp(budget.share(head), least, own);
    }
    kept.longest = (std::max)(kept.longest, own);
    kept.total += own;
  }
  kept.by_head = std::move(stored);
  return kept;
}

TESSERA_NAMESPACE_END
