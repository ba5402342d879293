// Attention of a prompt chunk along lines, on the CPU: blocks of rows read only the keys of their lines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/prompt/prompt_lines.hpp"
#include "attend.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// A logit rule and the lines of one query head: only keys on a line are visible.
struct line_rule {
  logit_rule rule;
  const std::uint8_t* vertical;  // [next]: whether a key's position is a vertical line
  const std::uint8_t* slash;     // [next]: whether a distance is a slash line
  index_t dense_from;

  bool visible(index_t query, index_t key) const {
    return rule.visible(query, key) && (query >= dense_from || vertical[key] || slash[query - key]);
  }
};

/// As for a logit_rule (kernel/tile.hpp).
inline bool apply_rule(const line_rule& lines, index_t query_position, const index_t* positions, int tokens,
                       float* row) {
  apply_rule(lines.rule, query_position, nullptr, tokens, row);
  bool all_visible = true;
  for (int t = 0; t < tokens; ++t) {
    if (lines.visible(query_position, positions[t])) continue;
    row[t] = -infinity;
    all_visible = false;
  }
  return all_visible;
}

namespace detail {

/// One query head's lines as flags, and by distance the number of nearer slash lines.
struct line_flags {
  host_vector<std::uint8_t> vertical, slash;
  host_vector<index_t> slashes_before;

  line_flags(const line_set& lines, index_t next) : vertical(std::size_t(next)), slash(std::size_t(next)) {
    for (const index_t at : lines.vertical) vertical[std::size_t(at)] = 1;
    for (const index_t distance : lines.slash) slash[std::size_t(distance)] = 1;
    slashes_before.assign(1, 0);
    for (const std::uint8_t is : slash) slashes_before.push_back(slashes_before.back() + is);
  }
  /// Whether a row of [first, last] attends a key at or below `last`.
  bool attended(index_t first, index_t last, index_t key) const {
    return vertical[std::size_t(key)] ||
           slashes_before[std::size_t(last - key + 1)] > slashes_before[std::size_t((std::max)(0, first - key))];
  }
};

}  // namespace detail

/// Causal attention of a prompt chunk of one sequence along its lines.
///
/// Shapes   as prefill_attention, of all rows of the chunk that the lines were chosen for: `lines.heads` [q_heads]. A
///          row that sees no key gives 0 and -infinity.
/// Cost     4 * rows * keys * head_dim flops per query head, keys being those that any of 64 neighbouring rows attends.
template <class View, class Q>
void line_attention(const View& view, const query_rows<Q>& queries, const logit_rule& rule, const prompt_lines& lines,
                    const attention_output& output, executor& workers) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  struct worker_memory {
    tile_memory<D, Dv> tile;
    alignas(64) float out[tile_rows * Dv];
    softmax_state states[tile_rows];
    index_t positions[tile_rows];
    host_vector<index_t> slots;
  };
  check_attention(view, queries, output);
  require(view.sequences == 1, "sequences of a prompt chunk", view.sequences, "1", "attend one sequence at a time");
  require(index_t(lines.heads.size()) == queries.q.heads && lines.first == queries.position(0, 0) &&
              lines.next == lines.first + queries.q.tokens,
          "lines", "of other heads or rows", "those of the chunk's queries",
          "choose them for the chunk that is attended");
  const index_t q_heads = queries.q.heads, group = q_heads / view.kv_heads, rows = queries.q.tokens;
  const index_t blocks = ceil_div(rows, tile_rows);
  host_vector<detail::line_flags> flags;  // all memory before anything is written
  for (const line_set& head : lines.heads) flags.emplace_back(head, lines.next);
  host_vector<std::unique_ptr<worker_memory>> memories;
  index_t longest = 0;
  for (index_t h = 0; h < view.kv_heads; ++h) longest = (std::max)(longest, view.length(0, h));
  while (index_t(memories.size()) < workers.threads()) {
    memories.push_back(std::make_unique<worker_memory>());
    memories.back()->slots.resize(std::size_t(longest));
  }
  workers.for_each(q_heads * blocks, [&](index_t item, int worker) {
    worker_memory& memory = *memories[std::size_t(worker)];
    const index_t block = blocks - 1 - item % blocks, q_head = item / blocks, head = q_head / group;
    const index_t first = block * tile_rows;
    const int count = int((std::min<index_t>)(tile_rows, rows - first));
    for (int r = 0; r < count; ++r) memory.positions[r] = queries.position(0, first + r);
    const index_t oldest = memory.positions[0], newest = memory.positions[count - 1];
    const detail::line_flags& head_flags = flags[std::size_t(q_head)];
    index_t read = 0;
    for (index_t slot = 0; slot < view.length(0, head); ++slot) {
      const index_t at = view.position(0, head, slot);
      if (at > newest) break;
      if (newest >= lines.dense_from || head_flags.attended(oldest, newest, at))
        memory.slots[std::size_t(read++)] = slot;
    }
    load_queries<D>(queries, rule, 0, q_head, 1, first, count, memory.tile.queries);
    std::fill_n(memory.out, count * Dv, 0.0f);
    std::fill_n(memory.states, count, softmax_state{});
    const line_rule visible{rule, head_flags.vertical.data(), head_flags.slash.data(), lines.dense_from};
    const selection_view chosen{memory.slots.data(), &read};
    detail::attend_converted_rows(view, 0, head, slot_source{&chosen, 0, read}, 0, read, visible, count,
                                  memory.positions, memory.tile, partial_rows<Dv>{memory.out, memory.states});
    for (int r = 0; r < count; ++r) {
      detail::finish_row<Dv>(rule.sink_logits ? rule.sink_logits + q_head : nullptr, memory.states[r],
                             memory.out + r * Dv, output.out.row(0, first + r, q_head),
                             output.lse.data ? output.lse.row(0, first + r, q_head) : nullptr);
    }
  });
}

}  // namespace cpu
TESSERA_NAMESPACE_END
