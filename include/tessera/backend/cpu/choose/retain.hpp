// Budget and selection over a layer's scores, on the host.
#pragma once

#include <algorithm>
#include <vector>

#include "../../../core/layer_scores.hpp"
#include "../../../core/selection.hpp"
#include "../../../recipe.hpp"
#include "../score/finish.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of choose_kept, reused from call to call.
struct retain_workspace {
  top_k_scratch top_k;
  std::vector<float> finished, pooled;
  std::vector<index_t> counts;
};

/// Chooses what a layer of one sequence keeps: the scorer's last pass over each head's candidates, budget over the
/// layer, selector in each head. A layer that the budget keeps all of is not looked at.
/// Shapes   raw [kv_heads, tokens] as layer_scores says, at least one head; `kept` gets one row per kv_head.
/// Returns  the scores as budget and selector saw them, valid until the workspace or `raw` changes; none of a layer that
///          was not looked at.
template <class Scorer, class Budget, class Selector>
layer_scores choose_kept(const choosing_stage<Scorer, Budget, Selector>& policy, const layer_scores& raw,
                         selection& kept, retain_workspace& workspace) {
  const index_t heads = raw.kv_heads;
  require(heads >= 1, "kv_heads of the scores", heads, "at least 1", "pass the scores of every kv_head");
  auto& counts = workspace.counts;
  counts.assign(raw.tokens, raw.tokens + heads);
  layer_scores scores = raw;
  const index_t longest = *std::max_element(counts.begin(), counts.end());
  const bool whole = keeps_all(policy.budget, {raw.layer, raw.layers, heads, raw.protected_tail, longest});
  if (!whole) {
    offset_t end = 0;
    for (index_t h = 0; h < heads; ++h) end = std::max(end, raw.offsets[h] + raw.tokens[h]);
    workspace.finished.resize(std::size_t(end));
    for (index_t h = 0; h < heads; ++h) {
      float* out = workspace.finished.data() + raw.offsets[h];
      if (finished(policy.scorer, raw.head(h), raw.candidates(h), out, workspace.pooled) == out) {
        scores.scores = workspace.finished.data();  // of every head alike
      }
    }
    allot_counts(policy.budget, scores, counts.data());
    for (index_t h = 0; h < heads; ++h) {
      counts[std::size_t(h)] =
          std::clamp(counts[std::size_t(h)], std::min(raw.protected_tail, raw.tokens[h]), raw.tokens[h]);
    }
  }
  kept.reset(counts);
  for (index_t h = 0; h < heads; ++h) {
    kept.counts[std::size_t(h)] = choose_slots(policy.selector, scores.head(h), raw.tokens[h], raw.protected_tail,
                                               counts[std::size_t(h)], kept.row(h), workspace.top_k);
  }
  if (whole) scores.scores = nullptr;
  return scores;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
