// The choice of what a batch keeps of one layer, on the CPU: scores by the policy's scorer, counts by its budget, slots
// by its selector.
#pragma once

#include <algorithm>
#include <string>

#include "../../../core/engine/choose_problem.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../core/model_shape.hpp"
#include "../score/contents.hpp"
#include "../score/expected.hpp"
#include "../score/score.hpp"
#include "../store/page_checks.hpp"
#include "retain.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of score_and_choose, reused from call to call.
template <int D>
struct choose_workspace {
  score_workspace<D> scoring;
  retain_workspace retaining;
  host_vector<float> raw;                     // scores, one head after another
  host_vector<offset_t> offsets;              // where heads begin in it
  host_vector<offset_t> begins;               // the same within one sequence
  host_vector<index_t> lengths;               // by head
  host_vector<index_t> tails;                 // by sequence
  host_vector<index_t> observed;              // by sequence, queries that are scored
  host_vector<index_t> settled;               // by head, first slots that stay; none without a reach
  host_vector<index_t> earlier;               // by head, those from before the turn
  host_vector<float> joined;                  // one row for all heads of a layer
  host_vector<float> weights;                 // as raw; or what scores are multiplied by
  host_vector<expected_workspace> expecting;  // by worker
  host_vector<float> rows;                    // by worker, of what is projected or lagged
  selection chosen;                           // of one sequence
};

namespace detail {

template <class Policy, class View, class E>
void check_choose(const choose_problem<View, E>& p) {
  constexpr bool by_queries = Policy::observed == observes::window, by_scores = lies_beside_tokens(Policy::observed);
  constexpr bool by_position = positional_scorer<typename Policy::scorer_type>, by_segments = Policy::needs_segments,
                 by_statistics = Policy::observed == observes::statistics;
  constexpr bool for_layers = joining_scope<typename Policy::scope_type>;
  p.check(by_queries || by_position || by_statistics, by_statistics);
  require_memory(p.view, by_queries, false);
  require_pages(p.view, p.pool);
  require_ascending(p.view);
  for (index_t row = 0; by_queries && p.q.tokens <= 0 && row < p.view.sequences * p.view.kv_heads; ++row) {
    if (p.view.length(row / p.view.kv_heads, row % p.view.kv_heads) > 0) require_queries(p);
  }
  for (index_t row = 0; by_scores && !p.scores.data && row < p.view.sequences * p.view.kv_heads; ++row) {
    require(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads) == 0, "scores", "null",
            "one for every stored slot", "accumulate them beside the tokens: cpu::score_rows");
  }
  for (index_t b = 0; by_queries && p.valid && b < p.view.sequences; ++b) {
    require(p.valid[b] >= 0 && p.valid[b] <= p.q.tokens, "valid queries", p.valid[b],
            "0 to " + std::to_string(p.q.tokens), "pass how many of q count for each sequence");
  }
  for (index_t row = 0; by_segments && !p.segments.data && row < p.view.sequences * p.view.kv_heads; ++row) {
    require(p.view.length(row / p.view.kv_heads, row % p.view.kv_heads) == 0, "segments", "null",
            "which segment of the text every stored slot belongs to", "keep them beside the tokens: cpu::append");
  }
  for (index_t b = 0; for_layers && b < p.view.sequences; ++b) {
    for (index_t h = 1; h < p.view.kv_heads; ++h) {
      require(p.view.length(b, h) == p.view.length(b, 0), "tokens of kv_head " + std::to_string(h), p.view.length(b, h),
              "those of kv_head 0, which are " + std::to_string(p.view.length(b, 0)),
              "heads that keep the same slots have the same length");
    }
  }
  if (by_queries && p.lse.data) require_same_shape("shape of lse", p.lse, p.q);
}

/// Slots of a head before a position.
template <class View>
index_t slots_before(const View& view, index_t sequence, index_t head, index_t position) {
  index_t first = 0, last = view.length(sequence, head);
  while (first < last) {
    const index_t middle = first + (last - first) / 2;
    view.position(sequence, head, middle) < position ? first = middle + 1 : last = middle;
  }
  return first;
}

/// The length of every row and the begin of its scores; for every sequence, how many newest tokens stay.
template <class View, class E, class Policy>
void lay_out(const Policy& policy, const choose_problem<View, E>& p, choose_workspace<View::k_dim>& workspace) {
  workspace.lengths.clear();
  workspace.offsets.clear();
  workspace.tails.clear();
  workspace.observed.clear();
  workspace.settled.clear();
  workspace.earlier.clear();
  offset_t total = 0;
  for (index_t b = 0; b < p.view.sequences; ++b) {
    const index_t budget = p.budgets ? p.budgets[b] : policy.budget.tokens;
    const index_t queries = p.valid ? p.valid[b] : p.q.tokens;
    const index_t own = Policy::observed == observes::window ? queries : policy.scorer.protected_tail(budget);
    workspace.tails.push_back(p.tails ? p.tails[b] : (std::max)(p.tail, own));
    workspace.observed.push_back(queries);
    for (index_t h = 0; h < p.view.kv_heads; ++h) {
      workspace.lengths.push_back(p.view.length(b, h));
      workspace.offsets.push_back(total);
      total += workspace.lengths.back();
      if (!p.reach) continue;
      workspace.settled.push_back(slots_before(p.view, b, h, p.reach[b].open));
      workspace.earlier.push_back(slots_before(p.view, b, h, p.reach[b].begin));
    }
  }
}

/// Scores that need no queries: by position, by stored rows, or by stored rows and statistics of queries. Sequences
/// that are `whole` get none.
template <class Policy, class View, class E, class Whole>
void score_what_is_stored(const Policy& policy, const choose_problem<View, E>& p,
                          choose_workspace<View::k_dim>& workspace, const Whole& whole, executor& workers) {
  using scorer = typename Policy::scorer_type;
  const index_t heads = p.view.kv_heads;
  const auto scores = [&](index_t row) { return workspace.raw.data() + workspace.offsets[std::size_t(row)]; };
  if constexpr (positional_scorer<scorer>) {
    for (index_t row = 0; row < p.view.sequences * heads; ++row) {
      for (index_t i = 0; i < workspace.lengths[std::size_t(row)]; ++i) {
        scores(row)[i] =
            policy.scorer.score(p.view.position(row / heads, row % heads, i), p.first_position[row / heads]);
      }
    }
  }
  if constexpr (lagged_scorer<scorer>) {
    const std::size_t each = 2 * std::size_t(policy.scorer.lag);
    workspace.rows.resize(each * std::size_t(workers.threads()));
    workers.for_each(p.view.sequences * heads, [&](index_t row, int worker) {
      if (whole(row / heads)) return;
      score_lagged(p.view, row / heads, row % heads, policy.scorer, scores(row),
                   workspace.rows.data() + each * std::size_t(worker));
    });
  }
  if constexpr (contents_scorer<scorer>) {
    workers.for_each(p.view.sequences * heads, [&](index_t row, int) {
      if (!whole(row / heads)) score_contents(p.view, row / heads, row % heads, policy.scorer, scores(row));
    });
  }
  if constexpr (statistical_scorer<scorer>) {
    workspace.expecting.resize(std::size_t(workers.threads()));
    workers.for_each(p.view.sequences * heads, [&](index_t row, int worker) {
      if (whole(row / heads)) return;
      score_expected(p.view, row / heads, row % heads, policy.scorer, p.statistics[row / heads], p.q.heads / heads,
                     p.rule, p.rope_frequencies, p.first_position[row / heads], scores(row),
                     workspace.expecting[std::size_t(worker)]);
    });
  }
}

/// Multiplies scores by the scorer's factors, if it has any.
template <class Policy, class View, class E, class Whole>
void multiply(const Policy& policy, const choose_problem<View, E>& p, choose_workspace<View::k_dim>& workspace,
              const Whole& whole, executor& workers) {
  if constexpr (multiplied_scorer<typename Policy::scorer_type>) {
    const index_t heads = p.view.kv_heads;
    workspace.weights.resize(workspace.raw.size());
    workers.for_each(p.view.sequences * heads, [&](index_t row, int) {
      if (whole(row / heads)) return;
      const offset_t first = workspace.offsets[std::size_t(row)];
      float *scores = workspace.raw.data() + first, *factors = workspace.weights.data() + first;
      score_contents(p.view, row / heads, row % heads, policy.scorer.factor, factors);
      for (index_t i = 0; i < workspace.lengths[std::size_t(row)]; ++i) {
        scores[i] = policy.scorer.multiplied(scores[i], factors[i]);
      }
    });
  }
}

/// The factors by which the scorer weighs values, of sequences that choose.
template <class Policy, class View, class E, class Whole>
void weigh_values(const Policy& policy, const choose_problem<View, E>& p, choose_workspace<View::k_dim>& workspace,
                  const Whole& whole, executor& workers) {
  if constexpr (weighted_scorer<typename Policy::scorer_type>) {
    const index_t heads = p.view.kv_heads, group = p.q.heads / heads;
    require(!p.projection || (p.hidden >= 1 && group >= 1), "hidden and query heads of the output projection",
            std::to_string(p.hidden) + " and " + std::to_string(p.q.heads), "at least 1, and a multiple of kv_heads",
            "pass [q_heads, v_dim, hidden]");
    workspace.weights.resize(
        workspace.lengths.empty() ? 0 : std::size_t(workspace.offsets.back() + workspace.lengths.back()));
    workspace.rows.resize(std::size_t(p.hidden) * std::size_t(workers.threads()));
    workers.for_each(p.view.sequences * heads, [&](index_t row, int worker) {
      if (whole(row / heads)) return;
      float* weights = workspace.weights.data() + workspace.offsets[std::size_t(row)];
      if (p.projection) {
        score_projected(p.view, row / heads, row % heads, policy.scorer.weight,
                        p.projection + offset_t(row % heads) * group * View::v_dim * p.hidden, p.hidden, group,
                        workspace.rows.data() + offset_t(p.hidden) * worker, weights);
      } else {
        score_contents(p.view, row / heads, row % heads, policy.scorer.weight, weights);
      }
    });
  }
}

/// Turns sums over a window's query rows into means, if the scorer needs these.
template <class Scorer, class View, class E>
void divide_by_rows(const Scorer&, const choose_problem<View, E>& p, choose_workspace<View::k_dim>& workspace) {
  if constexpr (joins_rows_by<Scorer> == row_join::mean) {
    for (std::size_t row = 0; row < workspace.lengths.size(); ++row) {
      const index_t heads = p.view.kv_heads, tokens = workspace.observed[row / std::size_t(heads)];
      float* scores = workspace.raw.data() + workspace.offsets[row];
      for (index_t i = 0; tokens > 0 && i < workspace.lengths[row]; ++i)
        scores[i] /= float(tokens * (p.q.heads / heads));
    }
  }
}

/// Scores the sequences of a batch that are not `whole`, without a choice. `view`: the problem's, known to ascend.
template <class Policy, class View, class E, class Whole>
void score_batch(const Policy& policy, const choose_problem<View, E>& p, const View& view,
                 choose_workspace<View::k_dim>& workspace, const Whole& whole, executor& workers) {
  if constexpr (!lies_beside_tokens(Policy::observed)) {
    workspace.raw.assign(
        workspace.lengths.empty() ? 0 : std::size_t(workspace.offsets.back() + workspace.lengths.back()), 0.0f);
  }
  score_what_is_stored(policy, p, workspace, whole, workers);
  weigh_values(policy, p, workspace, whole, workers);
  if constexpr (Policy::observed == observes::window) {
    bool any = false;
    for (index_t b = 0; b < view.sequences; ++b) {
      if (whole(b)) workspace.observed[std::size_t(b)] = 0;
      any |= workspace.observed[std::size_t(b)] > 0;
    }
    if (any) {
      score_rows(view, query_rows<E>{p.q, p.first_position, workspace.observed.data()}, p.rule, policy.scorer,
                 workspace.raw.data(), workspace.offsets.data(), workspace.scoring, workers, p.lse);
      divide_by_rows(policy.scorer, p, workspace);
    }
  }
  multiply(policy, p, workspace, whole, workers);
}

/// The scores of one sequence of a batch that has been scored.
template <class Policy, class View, class E>
layer_scores scores_of(const choose_problem<View, E>& p, index_t b, choose_workspace<View::k_dim>& workspace) {
  const index_t heads = p.view.kv_heads;
  const auto begin_of = [&](index_t h) -> const float* {
    if constexpr (lies_beside_tokens(Policy::observed)) return p.scores.row(b, h, heads);
    return workspace.raw.data() + workspace.offsets[std::size_t(b * heads + h)];
  };
  const float* first = begin_of(0);
  for (index_t h = 1; h < heads; ++h) first = (std::min)(first, begin_of(h));
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
  if (p.reach) {
    scores.settled = workspace.settled.data() + b * heads;
    scores.earlier = workspace.earlier.data() + b * heads;
    scores.prompt_tokens = p.reach[b].prompt_tokens();
  }
  return scores;
}

/// Joins the scores of all heads of a layer into one row.
template <joining_scope Scope>
void join_heads(const Scope& scope, const layer_scores& scores, index_t summed, host_vector<float>& joined) {
  joined.assign(scores.head(0), scores.head(0) + scores.tokens[0]);
  for (index_t h = 1; h < scores.kv_heads; ++h) {
    for (std::size_t i = 0; i < joined.size(); ++i) joined[i] = scope.join(joined[i], scores.head(h)[i]);
  }
  for (float& score : joined) score = scope.joined(score, summed);
}

/// Chooses for one sequence, by the policy's scope.
template <class Policy>
layer_scores choose_in_scope(const Policy& policy, const layer_scores& scores, index_t summed, const slot_facts& beside,
                             selection& kept, retain_workspace& memory, host_vector<float>& joined,
                             host_vector<offset_t>& begins) {
  if constexpr (!joining_scope<typename Policy::scope_type>) {
    return choose_kept(policy, scores, kept, memory, beside);
  } else {
    join_heads(policy.scope, scores, summed, joined);
    std::fill(begins.begin(), begins.end(), 0);  // every head has the joined row now
    layer_scores all = scores;
    all.offsets = begins.data();
    all.scores = joined.data();
    layer_scores layer = all;
    layer.kv_heads = 1;
    all.scores = choose_kept(policy, layer, kept, memory, beside).scores;
    const std::size_t own = kept.indices.size(), heads = std::size_t(scores.kv_heads);
    kept.counts.resize(heads, kept.counts[0]);
    kept.indices.resize(own * heads);
    memory.blocks.resize(heads, host_vector<index_t>(memory.blocks[0]));
    for (std::size_t h = 1; h < heads; ++h) {
      kept.offsets.push_back(offset_t(own * (h + 1)));
      std::copy_n(kept.indices.begin(), own, kept.indices.begin() + offset_t(own * h));
    }
    return all;
  }
}

}  // namespace detail

/// Chooses the slots that every (sequence, kv_head) of a batch keeps in one layer, as cuda::score_and_choose does. The
/// caches' first stages call it. `policy` is the first stage of a recipe, `method.retain`. A budget that pays for two
/// stages is planned first: `method.retain.planned(method.plan(prompt_tokens))`.
/// Shapes   as choose_problem says; row sequence * kv_heads + head of `kept` has that head's slots.
/// Returns  the last sequence's scores as budget and selector got them, valid until the workspace changes; none of a
///          sequence that was not scored.
/// Errors   input of the scorer is missing; queries or tables that do not fit the view; positions that do not ascend:
///          tessera::error.
/// Cost     a scorer of a window reads K twice (once with the engine's log-sum-exps); those of positions and of
///          accumulated scores read no key; those of contents read their rows once, or twice where they compare them
///          with their mean. Sequences that fit the budget are not scored.
template <class Policy, class View, class E>
layer_scores score_and_choose(const Policy& policy, const choose_problem<View, E>& p, selection& kept,
                              choose_workspace<View::k_dim>& workspace, executor& workers) {
  static_assert(check_chooses<Policy>());
  constexpr observes observed = Policy::observed;
  const default_float_mode mode;
  detail::check_choose<Policy>(p);
  detail::lay_out(policy, p, workspace);
  const View view = ascending_view(p.view);  // check_choose has looked
  const index_t heads = view.kv_heads;
  const auto own_policy = [&](index_t b) {
    Policy own = policy;
    if (p.budgets) own.budget.tokens = p.budgets[b];
    return own;
  };
  // A sequence that fits the budget is kept whatever its scores.
  const auto whole = [&](index_t b) {
    const index_t* lengths = workspace.lengths.data() + b * heads;
    return keeps_all(own_policy(b).budget,
                     {p.layer, p.layers, joining_scope<typename Policy::scope_type> ? 1 : heads,
                      workspace.tails[std::size_t(b)], *std::max_element(lengths, lengths + heads)});
  };
  detail::score_batch(policy, p, view, workspace, whole, workers);
  if (view.sequences != 1) kept.reset({});
  layer_scores seen;
  for (index_t b = 0; b < view.sequences; ++b) {
    const layer_scores scores = detail::scores_of<Policy>(p, b, workspace);
    slot_facts beside{
        p.segments, {workspace.weights.data(), 0, 0, workspace.offsets.data() + b * heads}, p.counts, p.granularity};
    if (p.segments.begin) {
      beside.segments.begin += offset_t(b) * heads;
    } else if (p.segments.data) {
      beside.segments.data = p.segments.row(b, 0, heads);
    }
    constexpr row_join rows_by = joins_rows_by<typename Policy::scorer_type>;
    constexpr bool adds_up = observed != observes::nothing && observed != observes::statistics &&
                             (rows_by == row_join::sum || rows_by == row_join::newest);
    const index_t summed = adds_up && p.q.heads > 0 ? p.q.heads : heads;
    seen = detail::choose_in_scope(own_policy(b), scores, summed, beside, view.sequences == 1 ? kept : workspace.chosen,
                                   workspace.retaining, workspace.joined, workspace.begins);
    if (view.sequences != 1) kept.append(workspace.chosen);
  }
  return seen;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
