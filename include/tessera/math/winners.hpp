// How many of each head's scores are among the best of all heads.
#pragma once

#include <algorithm>

#include "../core/host/host_vector.hpp"
#include "../core/plan/layer_scores.hpp"
#include "ordered.hpp"

TESSERA_NAMESPACE_BEGIN

/// Counts the best `places` candidates of all heads together, by head. Equal scores: the lower head, then the lower
/// slot, comes first; NaN last.
/// Shapes   won [kv_heads].   Cost  O(n) over the layer's scores on average.
inline void count_winners(const layer_scores& scores, offset_t places, index_t* won) {
  struct candidate {
    std::uint32_t score;
    index_t head, slot;
    bool operator<(const candidate& other) const {
      if (score != other.score) return score > other.score;
      return head != other.head ? head < other.head : slot < other.slot;
    }
  };
  host_vector<candidate> all;
  for (index_t h = 0; h < scores.kv_heads; ++h) {
    const float* s = scores.head(h);
    for (index_t i = 0; i < scores.candidates(h); ++i) all.push_back({ordered_bits(s[i]), h, i});
  }
  places = (std::min)(offset_t(all.size()), places);
  if (places < offset_t(all.size())) std::nth_element(all.begin(), all.begin() + places, all.end());
  std::fill(won, won + scores.kv_heads, 0);
  for (offset_t i = 0; i < places; ++i) ++won[all[std::size_t(i)].head];
}

TESSERA_NAMESPACE_END
