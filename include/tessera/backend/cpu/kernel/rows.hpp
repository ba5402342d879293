// Query rows with their positions, the slots of a row, and loading of both.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../../core/host/host_vector.hpp"
#include "../../../core/model_shape.hpp"
#include "../../../core/selection.hpp"
#include "tile.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Query rows of a batch, and where they stand.
/// Token t of sequence b has position first_position[b] + t, and sees keys at its own position and before it.
/// Shapes   q [sequences, tokens, q_heads, k_dim].
template <class Q>
struct query_rows {
  rows_view<const Q> q;
  const index_t* first_position = nullptr;  ///< [sequences]
  const index_t* valid = nullptr;           ///< [sequences], how many first tokens count; null: all. Scoring only
  index_t tokens_of(index_t sequence) const { return valid ? valid[sequence] : q.tokens; }
  index_t position(index_t sequence, index_t token) const { return first_position[sequence] + token; }
};
/// Of queries in memory that the caller may write.
template <class Q, class... Rest>
query_rows(rows_view<Q>, Rest...) -> query_rows<std::remove_const_t<Q>>;

/// Checks that the positions of one (sequence, kv_head) ascend by slot: masks and windows rely on it.
/// Errors   positions that do not: tessera::error.   Cost  one pass over them, unless the view says that they do.
template <class View>
void require_ascending(const View& view, index_t sequence, index_t head) {
  if constexpr (requires { view.order; }) {
    const index_t length = view.length(sequence, head);
    if (!view.positions || view.order == slot_order::ascending || length < 2) return;
    const index_t* positions = view.positions + view.position_row(sequence, head);
    int falls = 0;
    for (index_t i = 1; i < length; ++i) falls |= positions[i] <= positions[i - 1];
    if (!falls) return;
    index_t slot = 1;
    while (positions[slot] > positions[slot - 1]) ++slot;
    fail("position of slot " + std::to_string(slot) + " (sequence " + std::to_string(sequence) + ", kv_head " +
             std::to_string(head) + ")",
         positions[slot], "more than that of the slot before it, which is " + std::to_string(positions[slot - 1]),
         "pass the view of cpu::ordered_slots, which lists slots by their positions");
  }
}
/// The same for every (sequence, kv_head).
template <class View>
void require_ascending(const View& view) {
  if constexpr (requires { view.order; }) {
    if (!view.positions || view.order == slot_order::ascending) return;
    for (index_t row = 0; row < view.sequences * view.kv_heads; ++row)
      require_ascending(view, row / view.kv_heads, row % view.kv_heads);
  }
}
/// The view after a check of its positions, so that operations on it need no second one.
template <class View>
View ascending_view(View view) {
  if constexpr (requires { view.order; }) view.order = slot_order::ascending;
  return view;
}

/// Checks queries against a view: whole groups of heads, the view's sequences and head dim.
/// Errors   queries that do not fit: tessera::error.
template <class View, class Q>
void check_query_shapes(const View& view, const query_rows<Q>& queries) {
  require_head_counts(queries.q.heads, view.kv_heads);
  require(queries.q.sequences == view.sequences, "sequences of q", queries.q.sequences, std::to_string(view.sequences),
          "pass the queries of every sequence of the view");
  require(queries.q.tokens >= 0, "tokens of q", queries.q.tokens, "0 or more",
          "pass [sequences, tokens, q_heads, dim]");
  require(queries.q.data || queries.q.tokens == 0 || view.sequences == 0, "memory of q", "null", "memory behind it",
          "pass the rows themselves");
  require_dim(queries.q, View::k_dim, "q");
}
/// Errors   those of check_query_shapes, and positions that do not ascend: tessera::error.
template <class View, class Q>
void check_queries(const View& view, const query_rows<Q>& queries) {
  check_query_shapes(view, queries);
  require_ascending(view);
}

/// The m-th query head of every group of `members`, and the rule of these heads.
template <class Q>
struct group_member {
  rows_view<const Q> q;
  logit_rule rule;
  host_vector<float> sinks;

  group_member(const rows_view<const Q>& all, const logit_rule& of_all, index_t m, index_t members)
      : q(every_head(all, m, members)), rule(of_all) {
    for (index_t h = 0; members > 1 && rule.sink_logits && h < q.heads; ++h) {
      sinks.push_back(rule.sink_logits[h * members + m]);
    }
    if (!sinks.empty()) rule.sink_logits = sinks.data();
  }
  group_member(const group_member&) = delete;
};

/// Slots that a (sequence, kv_head) row reads: all of them, or those of a selection.
struct slot_source {
  const selection_view* chosen = nullptr;
  offset_t row = 0;
  index_t count = 0;
  index_t operator[](index_t i) const { return chosen ? chosen->row(row)[i] : i; }
};

/// The slots of a (sequence, kv_head): those of `chosen`, or all that the view stores where it is null.
template <class View>
slot_source source_of(const View& view, const selection_view* chosen, index_t sequence, index_t head) {
  const offset_t row = offset_t(sequence) * view.kv_heads + head;
  return {chosen, row, chosen ? chosen->count(row) : view.length(sequence, head)};
}

/// Copies the scaled queries of rows [first, first + rows) into fp32; row = token * group + query head of the group.
template <int D, class Q>
void load_queries(const query_rows<Q>& queries, const logit_rule& rule, index_t sequence, index_t head, index_t group,
                  index_t first, int rows, float* to) {
  const float scale = rule.scale_for(D);
  for (int r = 0; r < rows; ++r) {
    const index_t token = (first + r) / group, q_head = head * group + (first + r) % group;
    const Q* from = queries.q.row(sequence, token, q_head);
    for (int d = 0; d < D; ++d) to[r * D + d] = float(from[d]) * scale;
  }
}

/// to [k_dim] = the key of a slot, decoded.
template <class View>
TESSERA_INLINE void load_key(const View& view, index_t sequence, index_t head, index_t slot, float* to) {
  load_row<View::k_dim>(view.key(sequence, head, slot), view.k_strides.dim, to);
  if constexpr (View::encoding_type::scaled) scale_row<View::k_dim>(to, view.key_scale(sequence, head, slot));
}
/// to [v_dim] = the value of a slot, decoded.
template <class View>
TESSERA_INLINE void load_value(const View& view, index_t sequence, index_t head, index_t slot, float* to) {
  load_row<View::v_dim>(view.value(sequence, head, slot), view.value_stride(), to);
  if constexpr (View::encoding_type::scaled) scale_row<View::v_dim>(to, view.value_scale(sequence, head, slot));
}

/// Loads a tile's keys and positions.
template <class View, class Memory>
void load_keys(const View& view, index_t sequence, index_t head, const slot_source& slots, index_t first, int tokens,
               Memory& memory) {
  for (int t = 0; t < tokens; ++t) {
    const index_t slot = slots[first + t];
    load_key(view, sequence, head, slot, memory.keys + t * View::k_dim);
    memory.positions[t] = view.position(sequence, head, slot);
  }
}

/// Loads a tile's keys as [k_dim, tile_tokens] and its positions, from pages whose keys lie as [k_dim, page] (vLLM's on
/// the CPU). Returns false, and loads nothing, where they lie otherwise. The values are those of `load_keys` and
/// `transpose`.
template <class View, class Memory>
bool load_transposed_keys(const View& view, index_t sequence, index_t head, index_t first, int tokens, Memory& memory) {
  if constexpr (requires { requires page_table<std::remove_cvref_t<decltype(view.table)>>; }) {
    using stored_type = std::remove_const_t<typename View::stored_type>;
    if constexpr (!View::encoding_type::scaled && elements_of_unit<stored_type> == 1) {
      if (view.k_strides.token != 1 || view.k_strides.dim == 1) return false;
      for (int t = 0; t < tokens;) {
        const index_t slot = first + t, page = view.table.page;
        const int run = int((std::min<index_t>)(tokens - t, page - slot % page));
        const auto* from = view.key(sequence, head, slot);
        for (int d = 0; d < View::k_dim; ++d) {
          const auto* column = from + d * view.k_strides.dim;
          float* to = memory.transposed + d * tile_tokens + t;
          int i = 0;
          for (; i + lane_count <= run; i += lane_count) store(to + i, load(column + i));
          for (; i < run; ++i) to[i] = float(column[i]);
        }
        for (int i = 0; i < run; ++i) memory.positions[t + i] = view.position(sequence, head, slot + i);
        t += run;
      }
      for (int d = 0; d < View::k_dim; ++d) {
        std::fill(memory.transposed + d * tile_tokens + tokens, memory.transposed + (d + 1) * tile_tokens, 0.0f);
      }
      return true;
    }
  }
  return false;
}

}  // namespace cpu
TESSERA_NAMESPACE_END
