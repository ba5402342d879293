// Scoring on the CPU: the weights of query rows for every stored key, without an attention matrix.
#pragma once

#include <algorithm>
#include <memory>

#include "../../../concepts/scorer.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../math/softmax_state.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/rows.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Slots of one work item of scoring.
inline constexpr index_t score_split = 512;

/// Memory of the scoring loops, one per worker, and of the rows' log-sum-exps.
template <int D>
struct score_workspace {
  struct worker_memory {
    tile_memory<D, 64> tile;  // values are not read
    index_t positions[tile_rows];
  };
  host_vector<std::unique_ptr<worker_memory>> workers;
  host_vector<float> lse;

  /// Allocates all memory of scoring, before anything is written.
  void prepare(int threads) {
    while (workers.size() < std::size_t(threads)) workers.push_back(std::make_unique<worker_memory>());
  }
  worker_memory& memory(int worker) { return *workers[std::size_t(worker)]; }
};

namespace detail {

/// Logits of a block of rows against one tile, into memory.logits. A logit that is not a number, or +infinity, becomes
/// NaN: it is left out of its row's log-sum-exp and ranks its own token last.
template <class View, class Memory>
void tile_logits(const View& view, index_t sequence, index_t head, index_t first, int tokens, const logit_rule& rule,
                 int rows, const index_t* query_positions, Memory& memory) {
  if (!load_transposed_keys(view, sequence, head, first, tokens, memory)) {
    load_keys(view, sequence, head, slot_source{}, first, tokens, memory);
    transpose<View::k_dim>(memory.keys, tokens, memory.transposed);
  }
  dots_many_rows<View::k_dim>(memory.queries, rows, memory.transposed, memory.logits);
  for (int r = 0; r < rows; ++r) {
    float* row = memory.logits + r * tile_tokens;
    apply_rule(rule, query_positions[r], memory.positions, tokens, row);
    for (int t = 0; t < tile_tokens; ++t) {
      row[t] = row[t] < infinity ? row[t] : std::numeric_limits<float>::quiet_NaN();
    }
  }
}

}  // namespace detail

/// Log-sum-exp of every query row over all keys that it sees.
/// Shapes   lse [sequences, kv_heads, tokens * group], row = token * group + query head of the group; rows of tokens
///          that do not count are not written.
template <class View, class Q>
void row_log_sum_exp(const View& view, const query_rows<Q>& queries, const logit_rule& rule, float* lse,
                     score_workspace<View::k_dim>& workspace, executor& workers) {
  check_queries(view, queries);
  const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
  const index_t blocks = ceil_div(rows, tile_rows);
  workspace.prepare(workers.threads());
  workers.for_each(view.sequences * view.kv_heads * blocks, [&](index_t item, int worker) {
    auto& memory = workspace.memory(worker);
    const index_t block = blocks - 1 - item % blocks, head = item / blocks % view.kv_heads;
    const index_t sequence = item / blocks / view.kv_heads;
    const index_t first = block * tile_rows, end = queries.tokens_of(sequence) * group;
    if (first >= end) return;
    const int count = int((std::min<index_t>)(tile_rows, end - first));
    load_queries<View::k_dim>(queries, rule, sequence, head, group, first, count, memory.tile.queries);
    for (int r = 0; r < count; ++r) memory.positions[r] = queries.position(sequence, (first + r) / group);
    softmax_state states[tile_rows];
    const index_t tokens = view.length(sequence, head);
    for (index_t begin = 0; begin < tokens; begin += tile_tokens) {
      if (view.position(sequence, head, begin) > memory.positions[count - 1]) break;
      const int width = int((std::min<index_t>)(tile_tokens, tokens - begin));
      detail::tile_logits(view, sequence, head, begin, width, rule, count, memory.positions, memory.tile);
      for (int r = 0; r < count; ++r) {
        float* row = memory.tile.logits + r * tile_tokens;
        const float top = (std::max)(states[r].max, row_max(row));
        if (top == -infinity) continue;
        for (int t = 0; t < tile_tokens; ++t) row[t] = row[t] == row[t] ? row[t] : -infinity;
        const float shrink = states[r].empty() ? 0.0f : fast_exp(states[r].max - top);
        states[r].sum = states[r].sum * shrink + row_exp(row, top);
        states[r].max = top;
      }
    }
    float* out = lse + (offset_t(sequence) * view.kv_heads + head) * rows + first;
    for (int r = 0; r < count; ++r) {
      // A row of only NaN stays empty: it must add nothing, with a sink or without.
      if (rule.sink_logits && !states[r].empty())
        states[r].merge({rule.sink_logits[head * group + (first + r) % group], 1.0f});
      out[r] = states[r].log_sum_exp();
    }
  });
}

/// Adds the weights of query rows to every token's score. By the scorer's `rows`, the score increases by the sum over
/// rows of scorer.weigh(logit, lse), becomes the largest weight, or is replaced by the sum over the newest token's
/// rows.
///
/// Shapes   scores: head h of sequence b begins at scores + offsets[b * kv_heads + h]; lse as row_log_sum_exp gives it.
/// Rows are added one at a time in order, so feeding them in chunks gives the same bits as all at once.
template <class View, class Q, attentive_scorer Scorer>
void accumulate_scores(const View& view, const query_rows<Q>& queries, const logit_rule& rule, const Scorer& scorer,
                       const float* lse, float* scores, const offset_t* offsets,
                       score_workspace<View::k_dim>& workspace, executor& workers) {
  check_queries(view, queries);
  const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
  index_t longest = 0;
  for (index_t b = 0; b < view.sequences; ++b) {
    for (index_t h = 0; h < view.kv_heads; ++h) longest = (std::max)(longest, view.length(b, h));
  }
  const index_t splits = ceil_div(longest, score_split);
  workspace.prepare(workers.threads());
  workers.for_each(view.sequences * view.kv_heads * splits, [&](index_t item, int worker) {
    auto& memory = workspace.memory(worker);
    const index_t split = item % splits, head = item / splits % view.kv_heads;
    const index_t sequence = item / splits / view.kv_heads, row = sequence * view.kv_heads + head;
    const index_t end = (std::min)(view.length(sequence, head), (split + 1) * score_split);
    const index_t counted = queries.tokens_of(sequence) * group;
    index_t oldest = 0;
    if (joins_rows_by<Scorer> == row_join::newest && counted > 0) {
      oldest = counted - group;
      if (split * score_split < end)
        std::fill(scores + offsets[row] + split * score_split, scores + offsets[row] + end, 0.0f);
    }
    for (index_t first = oldest; first < counted; first += tile_rows) {
      const int count = int((std::min<index_t>)(tile_rows, counted - first));
      load_queries<View::k_dim>(queries, rule, sequence, head, group, first, count, memory.tile.queries);
      for (int r = 0; r < count; ++r) memory.positions[r] = queries.position(sequence, (first + r) / group);
      for (index_t begin = split * score_split; begin < end; begin += tile_tokens) {
        if (view.position(sequence, head, begin) > memory.positions[count - 1]) break;
        const int width = int((std::min<index_t>)(tile_tokens, end - begin));
        detail::tile_logits(view, sequence, head, begin, width, rule, count, memory.positions, memory.tile);
        float* out = scores + offsets[row] + begin;
        for (int r = 0; r < count; ++r) {
          const float row_lse = lse[offset_t(row) * rows + first + r];
          if (row_lse == -infinity) continue;  // a row that sees no key adds nothing
          float* logits = memory.tile.logits + r * tile_tokens;
          for (int t = 0; t < tile_tokens; ++t) logits[t] = scorer.weigh(logits[t], row_lse);
          for (int t = 0; t < width; ++t) {
            if constexpr (joins_rows_by<Scorer> == row_join::maximum) {
              // NaN stays, whatever follows: it ranks its token last.
              out[t] = logits[t] <= out[t] || out[t] != out[t] ? out[t] : logits[t];
            } else {
              out[t] += logits[t];
            }
          }
        }
      }
    }
  });
}

/// Both passes: adds the scores of `queries` to `scores`, which do not change when memory runs out. `given`: the rows'
/// log-sum-exps [sequences, tokens, q_heads] of the engine, which save the first pass; NaN and +infinity are computed
/// here.
template <class View, class Q, attentive_scorer Scorer>
void score_rows(const View& view, const query_rows<Q>& queries, const logit_rule& rule, const Scorer& scorer,
                float* scores, const offset_t* offsets, score_workspace<View::k_dim>& workspace, executor& workers,
                const rows_view<const float>& given = {}) {
  check_queries(view, queries);
  workspace.lse.resize(std::size_t(queries.q.sequences) * std::size_t(queries.q.tokens) * std::size_t(queries.q.heads));
  const auto each_given = [&](const auto& take) {
    const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
    for (index_t row = 0; given.data && row < view.sequences * view.kv_heads; ++row) {
      const index_t b = row / view.kv_heads, h = row % view.kv_heads;
      for (index_t r = 0; r < queries.tokens_of(b) * group; ++r) {
        take(workspace.lse[std::size_t(offset_t(row) * rows + r)], *given.row(b, r / group, h * group + r % group));
      }
    }
  };
  bool complete = given.data != nullptr;
  each_given([&](float, float theirs) { complete = complete && theirs < infinity; });
  const View ordered = ascending_view(view);  // its positions were checked above
  if (!complete) row_log_sum_exp(ordered, queries, rule, workspace.lse.data(), workspace, workers);
  each_given([&](float& own, float theirs) { own = theirs < infinity ? theirs : own; });
  accumulate_scores(ordered, queries, rule, scorer, workspace.lse.data(), scores, offsets, workspace, workers);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
