// Attention on the CPU: prompt chunks and decode steps, over everything stored or over a selection.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

#include "../../../core/host/host_vector.hpp"
#include "../kernel/executor.hpp"
#include "../kernel/rows.hpp"
#include "../store/page_checks.hpp"
#include "merge.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// The output of attention: out [sequences, tokens, q_heads, v_dim], lse [sequences, tokens, q_heads] (null: not
/// wanted).
struct attention_output {
  rows_view<float> out;
  rows_view<float> lse;
};

/// Running result of a block of query rows: unnormalised output and softmax state of each row.
template <int Dv>
struct partial_rows {
  float* out;             // [rows, Dv]
  softmax_state* states;  // [rows]
};

namespace detail {

/// Turns a tile's dot products into weights, in place, and rescales sums, maxima and outputs of the rows. `positions`
/// as in apply_rule. Returns whether every row sees every token. Another type of rule has its own apply_rule.
template <int Dv, class Rule>
bool weigh_tile(const Rule& rule, int rows, const index_t* query_positions, const index_t* positions, int tokens,
                float* logits, partial_rows<Dv> result) {
  bool all_visible = true;
  for (int r = 0; r < rows; ++r) {
    float* row = logits + r * tile_tokens;
    all_visible &= apply_rule(rule, query_positions[r], positions, tokens, row);
    softmax_state& state = result.states[r];
    const float top = (std::max)(state.max, row_max(row));
    // A row that is masked so far, or has only NaN: exponents against 0 give 0 or NaN, without inf - inf.
    const float reference = top == -infinity ? 0.0f : top;
    const float shrink = state.max == -infinity ? 0.0f : fast_exp(state.max - reference);
    state.sum = state.sum * shrink + row_exp(row, reference);
    state.max = top;
    if (shrink != 1.0f) {
      for (int d = 0; d < Dv; ++d) result.out[r * Dv + d] *= shrink;
    }
  }
  return all_visible;
}

/// Pointers to a tile's stored rows, and their scales if they have any. Surplus pointers repeat the last row.
template <class View>
struct stored_tile {
  static constexpr int scale_count = View::encoding_type::scaled ? tile_tokens : 1;
  const typename View::stored_type *keys[tile_tokens], *values[tile_tokens];
  alignas(64) float key_scales[scale_count];
  alignas(64) float value_scales[scale_count];

  void find(const View& view, index_t sequence, index_t head, const slot_source& slots, index_t begin, index_t last) {
    for (int t = 0; t < tile_tokens; ++t) {
      const index_t slot = slots[(std::min)(begin + t, last - 1)];
      keys[t] = view.key(sequence, head, slot);
      values[t] = view.value(sequence, head, slot);
      if constexpr (View::encoding_type::scaled) {
        key_scales[t] = view.key_scale(sequence, head, slot);
        value_scales[t] = view.value_scale(sequence, head, slot);
      }
    }
  }
};

/// Attends slots [first, last) straight from the stored rows, whose elements are contiguous. For few query rows, which
/// read each stored row about once. Prefetches the next tile while one is worked on.
template <class View, class Memory>
void attend_stored_rows(const View& view, index_t sequence, index_t head, const slot_source& slots, index_t first,
                        index_t last, const logit_rule& rule, int rows, const index_t* query_positions, Memory& memory,
                        partial_rows<View::v_dim> result) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  constexpr bool scaled = View::encoding_type::scaled;
  using S = typename View::encoding_type::stored_type;
  // Queries and outputs are in the order in which stored rows are loaded; outputs are reordered at the end.
  float* queries = memory.transposed;
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < D; ++d) queries[r * D + order_in_row<D, S>(d)] = memory.queries[r * D + d];
  }
  stored_tile<View> tiles[2];
  if (first < last) tiles[0].find(view, sequence, head, slots, first, last);
  for (index_t begin = first, turn = 0; begin < last; begin += tile_tokens, turn = 1 - turn) {
    const int tokens = int((std::min<index_t>)(tile_tokens, last - begin));
    const index_t oldest = view.position(sequence, head, slots[begin]);
    if (oldest > query_positions[rows - 1]) break;  // positions ascend: the rest is in the future
    const stored_tile<View>& tile = tiles[turn];
    stored_tile<View>& next = tiles[1 - turn];
    next.find(view, sequence, head, slots, (std::min)(begin + tile_tokens, last - 1), last);
    dots_few_rows<D, Dv>(queries, rows, tile.keys, tile.values, tokens, memory.logits);
    if constexpr (scaled) scale_tokens(memory.logits, rows, tile.key_scales);
    const bool plain = rule.visible(query_positions[0], view.position(sequence, head, slots[begin + tokens - 1])) &&
                       rule.visible(query_positions[rows - 1], oldest);
    for (int t = 0; !plain && t < tokens; ++t) memory.positions[t] = view.position(sequence, head, slots[begin + t]);
    weigh_tile<Dv>(rule, rows, query_positions, plain ? nullptr : memory.positions, tokens, memory.logits, result);
    bool finite = true;
    if (!plain) {  // 0 * NaN is NaN: a token that a row must not see would reach its output
      finite = all_finite<Dv>([&](int t) { return tile.values[t]; }, tokens);
      if constexpr (scaled) {
        for (int t = 0; t < tokens; ++t) finite &= tile.value_scales[t] - tile.value_scales[t] == 0;
      }
    }
    if (finite) {
      if constexpr (scaled) scale_tokens(memory.logits, rows, tile.value_scales);
      add_values_few_rows<D, Dv>(memory.logits, rows, tile.values, next.keys, tokens, result.out);
    } else {
      float natural[Dv];
      for (int t = 0; t < tokens; ++t) {
        load_value(view, sequence, head, slots[begin + t], natural);
        for (int d = 0; d < Dv; ++d) memory.values[t * Dv + order_in_row<Dv, S>(d)] = natural[d];
      }
      add_visible_values<Dv>(memory.logits, rows, memory.values, tokens, result.out);
    }
  }
  for (int r = 0; r < rows; ++r) {
    float natural[Dv];
    for (int d = 0; d < Dv; ++d) natural[d] = result.out[r * Dv + order_in_row<Dv, S>(d)];
    std::copy_n(natural, Dv, result.out + r * Dv);
  }
}

/// Attends slots [first, last) of a tile of rows converted to fp32.
template <class View, class Memory, class Rule = logit_rule>
void attend_converted_rows(const View& view, index_t sequence, index_t head, const slot_source& slots, index_t first,
                           index_t last, const Rule& rule, int rows, const index_t* query_positions, Memory& memory,
                           partial_rows<View::v_dim> result) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  for (index_t begin = first; begin < last; begin += tile_tokens) {
    const int tokens = int((std::min<index_t>)(tile_tokens, last - begin));
    if (view.position(sequence, head, slots[begin]) > query_positions[rows - 1]) break;  // the rest is in the future
    load_keys(view, sequence, head, slots, begin, tokens, memory);
    for (int t = 0; t < tokens; ++t) load_value(view, sequence, head, slots[begin + t], memory.values + t * Dv);
    transpose<D>(memory.keys, tokens, memory.transposed);
    dots_many_rows<D>(memory.queries, rows, memory.transposed, memory.logits);
    const bool all_visible =
        weigh_tile<Dv>(rule, rows, query_positions, memory.positions, tokens, memory.logits, result);
    // 0 * NaN is NaN: a token that a row must not see would reach its output.
    if (all_visible || all_finite<Dv>([&](int t) { return memory.values + t * Dv; }, tokens)) {
      multiply_add<Dv>(memory.logits, tile_tokens, memory.values, Dv, rows, tokens, result.out, Dv);
    } else {
      add_visible_values<Dv>(memory.logits, rows, memory.values, tokens, result.out);
    }
  }
}

}  // namespace detail

/// Attends slots [first, last) of a source with `rows` query rows, whose queries are in `memory.queries` and whose
/// positions ascend. On entry `result` has zeros and empty states.
/// A tile's arithmetic for a row does not depend on other rows, so that chunks of any size give the same bits
/// (`few_rows` picks the kernel by the shape of the call, never by the size of its last block).
template <class View, class Memory>
void attend_range(const View& view, index_t sequence, index_t head, const slot_source& slots, index_t first,
                  index_t last, const logit_rule& rule, int rows, const index_t* query_positions, bool few_rows,
                  Memory& memory, partial_rows<View::v_dim> result) {
  auto attend = detail::attend_converted_rows<View, Memory>;
  if constexpr (encoding_by_element<typename View::encoding_type>) {
    if (few_rows && view.k_strides.dim == 1 && view.value_stride() == 1)
      attend = detail::attend_stored_rows<View, Memory>;
  }
  attend(view, sequence, head, slots, first, last, rule, rows, query_positions, memory, result);
}

/// Checks the shapes of an attention call.
template <class View, class Q>
void check_attention(const View& view, const query_rows<Q>& queries, const attention_output& output) {
  require_memory(view, true, true);
  check_queries(view, queries);
  require(queries.first_position || view.sequences == 0, "first_position", "null", "a position for each sequence",
          "say where the first query of each sequence stands");
  require(!queries.valid, "valid of queries", "given", "null", "attend all tokens of the call");
  require_dim(output.out, View::v_dim, "out");
  require_same_shape("out", output.out, queries.q);
  if (output.lse.data) require_same_shape("lse", output.lse, queries.q);
}

/// Causal attention of a prompt chunk over all stored tokens, those of the chunk included.
///
/// Shapes   queries.q [sequences, tokens, q_heads, k_dim]; kv_heads divides q_heads; output as attention_output.
/// Errors   memory that is missing, shapes that differ, positions that do not ascend: tessera::error.
/// Cost     4 * rows * tokens * head_dim flops per head; K and V are read once per 64 rows.
/// Chunked and one-shot calls give the same bits.
template <class View, class Q>
void prefill_attention(const View& view, const query_rows<Q>& queries, const logit_rule& rule,
                       const attention_output& output, executor& workers) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  struct worker_memory {
    tile_memory<D, Dv> tile;
    alignas(64) float out[tile_rows * Dv];
    softmax_state states[tile_rows];
    index_t positions[tile_rows];
  };
  check_attention(view, queries, output);
  const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
  const index_t blocks = ceil_div(rows, tile_rows);
  const index_t items = view.sequences * view.kv_heads * blocks;
  host_vector<std::unique_ptr<worker_memory>> memories;  // all of it before anything is written
  while (index_t(memories.size()) < workers.threads()) memories.push_back(std::make_unique<worker_memory>());
  workers.for_each(items, [&](index_t item, int worker) {
    worker_memory& memory = *memories[std::size_t(worker)];
    // The last blocks see most keys: start with them, so that no worker is left with a long one at the end.
    const index_t block = blocks - 1 - item % blocks, head = item / blocks % view.kv_heads;
    const index_t sequence = item / blocks / view.kv_heads;
    const index_t first = block * tile_rows;
    const int count = int((std::min<index_t>)(tile_rows, rows - first));
    load_queries<D>(queries, rule, sequence, head, group, first, count, memory.tile.queries);
    std::fill_n(memory.out, count * Dv, 0.0f);
    std::fill_n(memory.states, count, softmax_state{});
    for (int r = 0; r < count; ++r) memory.positions[r] = queries.position(sequence, (first + r) / group);
    const slot_source slots = source_of(view, nullptr, sequence, head);
    attend_range(view, sequence, head, slots, 0, slots.count, rule, count, memory.positions, false, memory.tile,
                 partial_rows<Dv>{memory.out, memory.states});
    for (int r = 0; r < count; ++r) {
      const index_t token = (first + r) / group, q_head = head * group + (first + r) % group;
      detail::finish_row<Dv>(rule.sink_logits ? rule.sink_logits + q_head : nullptr, memory.states[r],
                             memory.out + r * Dv, output.out.row(sequence, token, q_head),
                             output.lse.data ? output.lse.row(sequence, token, q_head) : nullptr);
    }
  });
}

/// Tokens of one split of a decode step: fixed, so that the order of merging does not depend on the machine.
inline constexpr index_t decode_split = 1024;

/// Scratch of `decode_attention`, reused from step to step.
struct decode_workspace {
  struct alignas(64) line {
    std::byte bytes[64];
  };
  host_vector<float> out;
  host_vector<softmax_state> states;
  host_vector<index_t> first_part;  // [sequences * kv_heads + 1]
  host_vector<line> tiles;  // by worker, of any head dim: 280 KiB at 256 would not fit into every thread's stack

  /// Memory of one type for each of `workers`.
  template <class Memory>
  void reserve_tiles(int workers) {
    static_assert(alignof(Memory) <= alignof(line), "tessera: a tile's memory must fit to the lines of the workspace");
    const std::size_t wanted = std::size_t(workers) * lines_of<Memory>;
    if (tiles.size() < wanted) tiles.resize(wanted);
  }
  template <class Memory>
  Memory& tile_of(int worker) {
    return *::new (static_cast<void*>(tiles.data() + std::size_t(worker) * lines_of<Memory>)) Memory;
  }

 private:
  template <class Memory>
  static constexpr std::size_t lines_of = (sizeof(Memory) + sizeof(line) - 1) / sizeof(line);
};

/// Attention of a decode step of 1 to 8 tokens, causal inside the step, over all stored tokens or a selection.
///
/// The step's own tokens are stored already, and the view's lengths count them: first_position is that of the step's
/// first token.
/// Shapes   as prefill_attention; `chosen` holds ascending slots by row sequence * kv_heads + head, null for all.
/// Errors   memory that is missing, shapes that differ, positions that do not ascend: tessera::error.
/// Cost     reads K and V of what is attended once. Splits of 1,024 tokens are merged in order: the same bits with any
///          number of threads. Allocates only when the workspace has to grow.
template <class View, class Q>
void decode_attention(const View& view, const query_rows<Q>& queries, const logit_rule& rule,
                      const selection_view* chosen, const attention_output& output, decode_workspace& workspace,
                      executor& workers) {
  constexpr int D = View::k_dim, Dv = View::v_dim;
  struct worker_memory {
    tile_memory<D, Dv> tile;
    index_t positions[tile_rows];
  };
  check_attention(view, queries, output);
  const default_float_mode mode;
  const index_t group = queries.q.heads / view.kv_heads, rows = queries.q.tokens * group;
  const index_t heads = view.sequences * view.kv_heads;
  auto& first_part = workspace.first_part;
  first_part.assign(1, 0);
  offset_t attended = 0;
  for (index_t h = 0; h < heads; ++h) {
    const index_t count = source_of(view, chosen, h / view.kv_heads, h % view.kv_heads).count;
    attended += count;
    first_part.push_back(first_part.back() + (std::max)(1, ceil_div(count, decode_split)));
  }
  const index_t parts = first_part.back();
  const std::size_t needed = std::size_t(parts) * std::size_t(rows);
  if (workspace.states.size() < needed) workspace.states.resize(needed);
  if (workspace.out.size() < needed * Dv) workspace.out.resize(needed * Dv);
  workspace.reserve_tiles<worker_memory>(workers.threads());
  workers.for_each(
      parts,
      [&](index_t part, int worker) {
        const index_t h =
            index_t(std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin()) - 1;
        const index_t sequence = h / view.kv_heads, head = h % view.kv_heads;
        const slot_source slots = source_of(view, chosen, sequence, head);
        const index_t first = (part - first_part[std::size_t(h)]) * decode_split;
        const index_t last = (std::min)(slots.count, first + decode_split);
        auto& [memory, positions] = workspace.tile_of<worker_memory>(worker);
        for (index_t block = 0; block < rows; block += tile_rows) {
          const int count = int((std::min<index_t>)(tile_rows, rows - block));
          const std::size_t at = std::size_t(part) * std::size_t(rows) + std::size_t(block);
          const partial_rows<Dv> result{workspace.out.data() + at * Dv, workspace.states.data() + at};
          std::fill_n(result.out, count * Dv, 0.0f);
          std::fill_n(result.states, count, softmax_state{});
          load_queries<D>(queries, rule, sequence, head, group, block, count, memory.queries);
          for (int r = 0; r < count; ++r) positions[r] = queries.position(sequence, (block + r) / group);
          attend_range(view, sequence, head, slots, first, last, rule, count, positions, rows < 16, memory, result);
        }
      },
      double(attended) * rows * (D + Dv));
  for (index_t h = 0; h < heads; ++h) {
    const index_t sequence = h / view.kv_heads, head = h % view.kv_heads;
    for (index_t r = 0; r < rows; ++r) {
      const auto at = [&](index_t part) { return std::size_t(part) * std::size_t(rows) + std::size_t(r); };
      const index_t begin = first_part[std::size_t(h)], end = first_part[std::size_t(h) + 1];
      const index_t token = r / group, q_head = head * group + r % group;
      detail::merge_row<Dv>(
          end - begin, [&](index_t i) { return workspace.states[at(begin + i)]; },
          [&](index_t i) { return workspace.out.data() + at(begin + i) * Dv; },
          rule.sink_logits ? rule.sink_logits + q_head : nullptr, output.out.row(sequence, token, q_head),
          output.lse.data ? output.lse.row(sequence, token, q_head) : nullptr);
    }
  }
}

/// prefill_attention over one part of the stored tokens, without sink logits: `merge_parts` adds them. `output` becomes
/// an attention_part, and must have an lse.
template <class View, class Q>
void prefill_attention_part(const View& view, const query_rows<Q>& queries, logit_rule rule,
                            const attention_output& output, executor& workers) {
  require_same_shape("lse of a part", output.lse, queries.q);
  rule.sink_logits = nullptr;
  prefill_attention(view, queries, rule, output, workers);
}
/// decode_attention over one part of the stored tokens.
template <class View, class Q>
void decode_attention_part(const View& view, const query_rows<Q>& queries, logit_rule rule,
                           const selection_view* chosen, const attention_output& output, decode_workspace& workspace,
                           executor& workers) {
  require_same_shape("lse of a part", output.lse, queries.q);
  rule.sink_logits = nullptr;
  decode_attention(view, queries, rule, chosen, output, workspace, workers);
}

}  // namespace cpu
TESSERA_NAMESPACE_END
