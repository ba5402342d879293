// Budget and selection over a layer's scores, on the host.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../core/layer_scores.hpp"
#include "../../../core/selection.hpp"
#include "../../../recipe.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of choose_kept, reused from call to call.
struct retain_workspace {
  top_k_scratch top_k;
  std::vector<float> finished, pooled;
  std::vector<index_t> counts;
};

/// Chooses what a layer of one sequence keeps: scorer.finish over each head's candidates, budget over the layer,
/// selector in each head. A layer in which no head exceeds the budget keeps everything.
/// Shapes   raw [kv_heads, tokens] as layer_scores says; `kept` gets one row per kv_head.
template <class Scorer, class Budget, class Selector>
void choose_kept(const choosing_stage<Scorer, Budget, Selector>& policy, const layer_scores& raw, selection& kept,
                 retain_workspace& workspace) {
  const index_t heads = raw.kv_heads;
  auto& counts = workspace.counts;
  counts.assign(raw.tokens, raw.tokens + heads);
  const bool fits = *std::max_element(counts.begin(), counts.end()) <= policy.budget.tokens;
  layer_scores scores = raw;
  if (!fits) {
    workspace.finished.resize(std::size_t(raw.offsets[heads - 1] + raw.tokens[heads - 1]));
    scores.scores = workspace.finished.data();
    for (index_t h = 0; h < heads; ++h) {
      policy.scorer.finish(raw.head(h), raw.candidates(h), workspace.finished.data() + raw.offsets[h],
                           workspace.pooled);
    }
    policy.budget.allot(scores, counts.data());
    for (index_t h = 0; h < heads; ++h) {
      counts[std::size_t(h)] =
          std::clamp(counts[std::size_t(h)], std::min(raw.protected_tail, raw.tokens[h]), raw.tokens[h]);
    }
  }
  kept.reset(counts);
  for (index_t h = 0; h < heads; ++h) {
    kept.counts[std::size_t(h)] = policy.selector.select(scores.head(h), raw.tokens[h], raw.protected_tail,
                                                         counts[std::size_t(h)], kept.row(h), workspace.top_k);
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
