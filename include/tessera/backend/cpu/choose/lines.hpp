// The choice of a prompt chunk's lines on the CPU: attention of sampled rows, then the policy.
#pragma once

#include <cmath>
#include <memory>

#include "../../../concepts/prefill.hpp"
#include "../../../core/host/host_vector.hpp"
#include "../../../math/softmax_state.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/rows.hpp"
#include "../score/score.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Scratch of choose_lines, reused from call to call.
template <int D>
struct line_workspace {
  struct worker_memory {
    tile_memory<D, 64> tile;  // values are not read
    line_cover cover;
    host_vector<float> weights;
    host_vector<index_t> positions, slot_at, stored_before;
  };
  host_vector<std::unique_ptr<worker_memory>> workers;
};

namespace detail {

/// Turns a row's logits into its softmax; NaN and hidden keys become 0. `sink`: the row's sink logit, or null.
inline void normalise_row(float* row, index_t count, const float* sink) {
  float top = sink ? *sink : -infinity;
  for (index_t i = 0; i < count; ++i) top = row[i] > top ? row[i] : top;
  double sum = sink ? std::exp(double(*sink) - double(top)) : 0.0;
  for (index_t i = 0; i < count; ++i) {
    row[i] = row[i] > -infinity ? std::exp(row[i] - top) : 0.0f;
    sum += row[i];
  }
  const float factor = sum > 0 ? float(1 / sum) : 0.0f;
  for (index_t i = 0; i < count; ++i) row[i] *= factor;
}

/// weights [rows, slots] of one query head: the attention of the sampled rows over all stored tokens of its kv_head.
template <class View, class Q, class Memory>
void attend_sampled_rows(const View& view, const query_rows<Q>& queries, const logit_rule& rule, index_t q_head,
                         const host_vector<index_t>& rows, Memory& memory) {
  constexpr int D = View::k_dim;
  const index_t head = q_head / (queries.q.heads / view.kv_heads), slots = view.length(0, head);
  memory.weights.assign(rows.size() * std::size_t(slots), -infinity);
  for (std::size_t first = 0; first < rows.size(); first += tile_rows) {
    const int count = int((std::min<std::size_t>)(tile_rows, rows.size() - first));
    const index_t* at = rows.data() + first;
    for (int r = 0; r < count; ++r) {
      load_queries<D>(queries, rule, 0, q_head, 1, at[r] - queries.position(0, 0), 1, memory.tile.queries + r * D);
    }
    for (index_t begin = 0; begin < slots; begin += tile_tokens) {
      if (view.position(0, head, begin) > at[count - 1]) break;  // the rest is in the future
      const int width = int((std::min<index_t>)(tile_tokens, slots - begin));
      tile_logits(view, 0, head, begin, width, rule, count, at, memory.tile);
      for (int r = 0; r < count; ++r) {
        std::copy_n(memory.tile.logits + r * tile_tokens, width,
                    memory.weights.data() + offset_t(first + std::size_t(r)) * slots + begin);
      }
    }
  }
  for (std::size_t r = 0; r < rows.size(); ++r) {
    normalise_row(memory.weights.data() + offset_t(r) * slots, slots,
                  rule.sink_logits ? rule.sink_logits + q_head : nullptr);
  }
}

}  // namespace detail

/// Chooses the lines of a chunk of one sequence by a line pattern.
/// Shapes   queries.q [1, tokens, q_heads, k_dim]: all rows of the chunk, which are stored already; `lines.heads` gets
///          one set a query head.
/// Cost     `rows * slots` floats for each worker; one pass over K for the sampled rows of every query head.
template <line_pattern Pattern, class View, class Q>
void choose_lines(const Pattern& pattern, const View& view, const query_rows<Q>& queries, const logit_rule& rule,
                  prompt_lines& lines, line_workspace<View::k_dim>& workspace, executor& workers) {
  check_queries(view, queries);
  require(view.sequences == 1, "sequences of a prompt chunk", view.sequences, "1",
          "choose lines one sequence at a time");
  lines.first = queries.position(0, 0);
  lines.next = lines.first + queries.q.tokens;
  lines.dense_from = lines.next - (std::min)(queries.q.tokens, dense_rows_of(pattern));
  lines.rows.clear();
  pattern.sample(lines.first, lines.next, lines.rows);
  lines.heads.resize(std::size_t(queries.q.heads));
  while (workspace.workers.size() < std::size_t(workers.threads())) {
    workspace.workers.push_back(std::make_unique<typename line_workspace<View::k_dim>::worker_memory>());
  }
  workers.for_each(queries.q.heads, [&](index_t q_head, int worker) {
    auto& memory = *workspace.workers[std::size_t(worker)];
    const index_t head = q_head / (queries.q.heads / view.kv_heads), slots = view.length(0, head);
    detail::attend_sampled_rows(view, queries, rule, q_head, lines.rows, memory);
    memory.positions.clear();
    memory.slot_at.assign(std::size_t(lines.next), no_index);
    memory.stored_before.assign(1, 0);
    for (index_t slot = 0; slot < slots; ++slot) {
      const index_t at = view.position(0, head, slot);
      memory.positions.push_back(at);
      memory.slot_at[std::size_t(at)] = slot;
    }
    for (index_t at = 0; at < lines.next; ++at) {
      memory.stored_before.push_back(memory.stored_before.back() + (memory.slot_at[std::size_t(at)] != no_index));
    }
    pattern.choose({lines.first, lines.next, lines.rows, memory.positions, memory.slot_at, memory.stored_before,
                    memory.weights.data()},
                   memory.cover, lines.heads[std::size_t(q_head)]);
  });
}

}  // namespace cpu
TESSERA_NAMESPACE_END
