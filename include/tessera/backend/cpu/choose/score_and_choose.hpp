// What a batch keeps of one layer, on the CPU: scores by the policy's scorer, counts by its budget, slots by its selector.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../../../core/choose_problem.hpp"
#include "../score/score.hpp"
#include "../store/page_checks.hpp"
#include "retain.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
inline namespace TESSERA_HOST_ISA {

/// Scratch of score_and_choose, reused from call to call.
template <int D>
struct choose_workspace {
  score_workspace<D> scoring;
  retain_workspace retaining;
  std::vector<float> raw;         // scores, one head after another
  std::vector<offset_t> offsets;  // where heads begin in it
  std::vector<offset_t> begins;   // the same within one sequence
  std::vector<index_t> lengths;   // by head
  std::vector<index_t> tails;     // by sequence
  std::vector<index_t> observed;  // by sequence, queries that are scored
  selection one;
};

namespace detail {

template <class View, class E>
void check_choose(const choose_problem<View, E>& p, bool by_queries, bool by_position, bool by_scores) {
  require(p.layers >= 1 && p.layer >= 0 && p.layer < p.layers, "layer", p.layer, "0 to layers - 1",
          "pass which layer of how many is asked about");
  require(p.view.kv_heads >= 1, "kv_heads", p.view.kv_heads, "at least 1", "pass the model's head counts");
  require(p.first_position || !(by_queries || by_position), "first_position", "null", "a position for each sequence",
          "say where the queries, or the next tokens, are");
  require_pages(p.view, p.pool);
  for (index_t row = 0; by_scores && !p.scores.data && row < p.view.sequences * p.view.kv_heads; ++row) {
    require(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads) == 0, "scores", "null",
            "one for every stored slot", "accumulate them beside the tokens: cpu::score_rows");
  }
  for (index_t b = 0; by_queries && p.valid && b < p.view.sequences; ++b) {
    require(p.valid[b] >= 0 && p.valid[b] <= p.q.tokens, "valid queries", p.valid[b],
            "0 to " + std::to_string(p.q.tokens), "pass how many of q count for each sequence");
  }
  if (by_queries && p.lse.data) {
    require(p.lse.sequences == p.q.sequences && p.lse.tokens == p.q.tokens && p.lse.heads == p.q.heads, "rows of lse",
            p.lse.tokens * p.lse.heads, "those of q, " + std::to_string(p.q.tokens * p.q.heads),
            "pass one log-sum-exp for every query row, or none");
  }
}

/// Of every row: its length, where its scores begin, and of every sequence how many of its newest tokens stay.
template <class View, class E, class Policy>
void lay_out(const Policy& policy, const choose_problem<View, E>& p, choose_workspace<View::k_dim>& workspace) {
  workspace.lengths.clear();
  workspace.offsets.clear();
  workspace.tails.clear();
  workspace.observed.clear();
  offset_t total = 0;
  for (index_t b = 0; b < p.view.sequences; ++b) {
    const index_t budget = p.budgets ? p.budgets[b] : policy.budget.tokens;
    const index_t queries = p.valid ? p.valid[b] : p.q.tokens;
    const index_t own = Policy::observed == observes::window ? queries : policy.scorer.protected_tail(budget);
    workspace.tails.push_back(p.tails ? p.tails[b] : std::max(p.tail, own));
    workspace.observed.push_back(queries);
    for (index_t h = 0; h < p.view.kv_heads; ++h) {
      workspace.lengths.push_back(p.view.length(b, h));
      workspace.offsets.push_back(total);
      total += workspace.lengths.back();
    }
  }
}

}  // namespace detail

/// Chooses what every (sequence, kv_head) of a batch keeps of one layer: what cuda::score_and_choose does, and what the
/// caches' first stages call. `policy` is the first stage of a recipe as its budget has been planned (`planned`).
/// Shapes   as choose_problem says; row sequence * kv_heads + head of `kept` has that head's slots.
/// Returns  the last sequence's scores as budget and selector saw them, valid until the workspace changes; none of one that
///          was not looked at.
/// Errors   what the scorer needs is not there; queries or tables that do not fit the view: tessera::error.
/// Cost     a scorer of a window reads K twice (once where the engine hands over the log-sum-exps); the others read no key.
///          Sequences that the budget keeps whole are not scored.
template <class Policy, class View, class E>
layer_scores score_and_choose(const Policy& policy, const choose_problem<View, E>& p, selection& kept,
                              choose_workspace<View::k_dim>& workspace, executor& workers) {
  constexpr observes observed = Policy::observed;
  constexpr bool by_queries = observed == observes::window, by_position = observed == observes::nothing;
  detail::check_choose(p, by_queries, by_position, observed == observes::every_query);
  detail::lay_out(policy, p, workspace);
  const View& view = p.view;
  const index_t heads = view.kv_heads;
  const auto own_policy = [&](index_t b) {
    Policy own = policy;
    if (p.budgets) own.budget.tokens = p.budgets[b];
    return own;
  };
  if constexpr (observed != observes::every_query) {
    workspace.raw.assign(
        workspace.lengths.empty() ? 0 : std::size_t(workspace.offsets.back() + workspace.lengths.back()), 0.0f);
  }
  if constexpr (by_position) {
    for (index_t row = 0; row < view.sequences * heads; ++row) {
      float* scores = workspace.raw.data() + workspace.offsets[std::size_t(row)];
      for (index_t i = 0; i < workspace.lengths[std::size_t(row)]; ++i) {
        scores[i] = policy.scorer.score(view.position(row / heads, row % heads, i), p.first_position[row / heads]);
      }
    }
  }
  if constexpr (by_queries) {
    bool any = false;
    for (index_t b = 0; b < view.sequences; ++b) {
      const index_t* lengths = workspace.lengths.data() + b * heads;
      const layer_extent extent{p.layer, p.layers, heads, workspace.tails[std::size_t(b)],
                                *std::max_element(lengths, lengths + heads)};
      // What the budget keeps whole is kept whatever its score.
      if (keeps_all(own_policy(b).budget, extent)) workspace.observed[std::size_t(b)] = 0;
      any |= workspace.observed[std::size_t(b)] > 0;
    }
    if (any) {
      score_rows(view, query_rows<E>{p.q, p.first_position, workspace.observed.data()}, p.rule, policy.scorer,
                 workspace.raw.data(), workspace.offsets.data(), workspace.scoring, workers, p.lse);
    }
  }
  if (view.sequences != 1) kept.reset({});
  layer_scores seen;
  for (index_t b = 0; b < view.sequences; ++b) {
    const float* rows = workspace.raw.data();
    const auto begin_of = [&](index_t h) -> const float* {
      if constexpr (observed == observes::every_query) return p.scores.row(b, h, heads);
      return rows + workspace.offsets[std::size_t(b * heads + h)];
    };
    const float* first = begin_of(0);
    for (index_t h = 1; h < heads; ++h) first = std::min(first, begin_of(h));
    workspace.begins.clear();
    for (index_t h = 0; h < heads; ++h) workspace.begins.push_back(begin_of(h) - first);
    layer_scores scores;
    scores.layer = p.layer;
    scores.layers = p.layers;
    scores.kv_heads = heads;
    scores.protected_tail = workspace.tails[std::size_t(b)];
    scores.tokens = workspace.lengths.data() + b * heads;
    scores.offsets = workspace.begins.data();
    scores.scores = first;
    seen = choose_kept(own_policy(b), scores, view.sequences == 1 ? kept : workspace.one, workspace.retaining);
    if (view.sequences != 1) kept.append(workspace.one);
  }
  return seen;
}

}  // namespace TESSERA_HOST_ISA
}  // namespace cpu
TESSERA_NAMESPACE_END
