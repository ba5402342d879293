// Budget and selection over a layer's scores, on the host.
#pragma once

#include <algorithm>

#include "../../../core/host/float_mode.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/plan/layer_scores.hpp"
#include "../../../core/plan/whole_pages.hpp"
#include "../../../core/selection.hpp"
#include "../../../core/stored/slot_column.hpp"
#include "../../../recipe.hpp"
#include "../score/finish.hpp"
#include "segments.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of choose_kept, reused from call to call.
struct retain_workspace {
  top_k_scratch top_k;
  host_vector<float> finished, pooled;
  host_vector<index_t> counts;
  host_vector<index_t> best;                 // of one head, before its segments or its weights choose
  host_vector<host_vector<index_t>> blocks;  // by head: the blocks of each segment of its candidates, 0: dropped
};

/// Columns beside the scores of a layer's slots, for scorers and selectors; of the one sequence 0.
struct slot_facts {
  slot_column<const index_t> segments{};
  slot_column<const float> weights{};
  const index_t* counts = nullptr;  ///< [kv_heads]: tokens that each head keeps, in place of the budget's
  index_t granularity = 1;          ///< counts become whole pages of so many slots
};

/// The scores by which a head is selected once its count is known: weighted, except those of tokens that are chosen
/// first.
/// Shapes   scores, weights, out [n]; out may be scores.
template <weighted_scorer Scorer>
void weigh_scores(const Scorer& scorer, const float* scores, const float* weights, index_t n, index_t first, float* out,
                  top_k_scratch& scratch, host_vector<index_t>& best) {
  best.resize(std::size_t(std::clamp(first, 0, n)));
  top_k(scores, n, index_t(best.size()), best.data(), scratch);
  for (index_t i = 0; i < n; ++i) out[i] = scorer.weighted(scores[i], weights[i]);
  for (const index_t slot : best) out[slot] = infinity;
}

/// Chooses the slots that a layer of one sequence keeps: the scorer's last passes over each head's candidates, the
/// budget over the layer, the selector in each head. A layer that fits the budget is not scored. Settled slots stay;
/// budgets count them, selectors get the slots behind them.
/// Shapes   raw [kv_heads, tokens] as layer_scores says, at least one head; `beside` for policies of segments or
///          weights; `kept` gets one row per kv_head.
/// Returns  the scores as budget and selector got them, valid until the workspace or `raw` changes; none of a layer
///          that was not scored.
template <class Scorer, class Budget, class Selector, class Scope>
layer_scores choose_kept(const choosing_stage<Scorer, Budget, Selector, Scope>& policy, const layer_scores& raw,
                         selection& kept, retain_workspace& workspace, const slot_facts& beside = {}) {
  const default_float_mode mode;
  const index_t heads = raw.kv_heads;
  require(heads >= 1, "kv_heads of the scores", heads, "at least 1", "pass the scores of every kv_head");
  auto& counts = workspace.counts;
  counts.assign(raw.tokens, raw.tokens + heads);
  layer_scores scores = raw;
  const index_t longest = *std::max_element(counts.begin(), counts.end());
  const bool whole =
      !beside.counts && keeps_all(policy.budget, {raw.layer, raw.layers, heads, raw.protected_tail, longest});
  if (!whole) {
    offset_t end = 0;
    for (index_t h = 0; h < heads; ++h) end = (std::max)(end, raw.offsets[h] + raw.tokens[h]);
    workspace.finished.resize(std::size_t(end));
    for (index_t h = 0; h < heads; ++h) {
      float* out = workspace.finished.data() + raw.offsets[h];
      const float* finished_scores = finished(policy.scorer, raw.head(h), raw.candidates(h), out, workspace.pooled);
      if constexpr (segment_scorer<Scorer>) {
        if (finished_scores != out) std::copy_n(finished_scores, raw.candidates(h), out);
        rescore_segments(policy.scorer, beside.segments.row(0, h, heads), raw.candidates(h), out);
        finished_scores = out;
      }
      if (finished_scores == out) scores.scores = workspace.finished.data();  // of every head alike
    }
    beside.counts ? void(std::copy_n(beside.counts, heads, counts.begin()))
                  : allot_counts(policy.budget, scores, counts.data());
    for (index_t h = 0; h < heads; ++h) {
      counts[std::size_t(h)] = std::clamp(
          counts[std::size_t(h)], (std::min)(raw.settled_of(h) + raw.protected_tail, raw.tokens[h]), raw.tokens[h]);
    }
    if (beside.granularity > 1)
      count_whole_pages(heads, beside.granularity, {raw.tokens, 1, raw.settled, raw.protected_tail}, counts.data());
    if constexpr (weighted_scorer<Scorer>) {
      for (index_t h = 0; h < heads; ++h) {
        const index_t stay = (std::min)(raw.settled_of(h), raw.candidates(h));
        const index_t first = policy.scorer.taken_first(counts[std::size_t(h)] - stay) - raw.protected_tail;
        weigh_scores(policy.scorer, scores.head(h) + stay, beside.weights.row(0, h, heads) + stay,
                     raw.candidates(h) - stay, first, workspace.finished.data() + raw.offsets[h] + stay,
                     workspace.top_k, workspace.best);
      }
      scores.scores = workspace.finished.data();
    }
  }
  kept.reset(counts);
  workspace.blocks.resize(std::size_t(heads));
  for (index_t h = 0; h < heads; ++h) {
    const index_t stay = raw.settled_of(h), n = raw.tokens[h] - stay, keep = counts[std::size_t(h)] - stay;
    const index_t tail = (std::min)(raw.protected_tail, n);
    const float* open = scores.head(h) + stay;
    index_t* out = kept.row(h);
    index_t& count = kept.counts[std::size_t(h)];
    for (index_t slot = 0; slot < stay; ++slot) *out++ = slot;
    if constexpr (segment_selector<Selector>) {
      count = choose_in_segments(policy.selector, open, beside.segments.row(0, h, heads) + stay, n, tail, keep, out,
                                 workspace.top_k, workspace.best, workspace.blocks[std::size_t(h)]);
    } else {
      count = choose_slots(policy.selector, open, n, tail, keep, out, workspace.top_k);
    }
    for (index_t i = 0; stay > 0 && i < count; ++i) out[i] += stay;
    count += stay;
  }
  if (whole) scores.scores = nullptr;
  return scores;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
