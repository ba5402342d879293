// Rows of drafts on the CPU: they lie beside the cache until they are accepted, and attend to each other there.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "../../../../core/error.hpp"
#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/logit_rule.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../../../../core/views.hpp"
#include "../../../../math/softmax_state.hpp"
#include "../../../../runtime/turn/draft.hpp"
#include "../../attend/attend.hpp"
#include "../../kernel/executor.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Adds a draft's own tokens to the outputs of its queries over what the cache stores.
/// Shapes   one sequence: q [tokens, q_heads, dim], k, v [tokens, kv_heads, dim]. `output` has the results over the
///          stored tokens, lse included, and gets those over both. Rows behind the tree's tokens stay.
/// Cost     tokens * ancestors * q_heads * (k_dim + v_dim) multiply-adds.
template <class Q, class E>
void attend_draft(const draft_tree& tree, const logit_rule& rule, const rows_view<const Q>& q,
                  const rows_view<const E>& k, const rows_view<const E>& v, const attention_output& output,
                  executor& workers) {
  const index_t group = q.heads / k.heads;
  const float scale = rule.scale_for(q.dim);
  workers.for_each(
      tree.tokens() * q.heads,
      [&](index_t item, int) {
        const index_t t = item / q.heads, head = item % q.heads, kv_head = head / group;
        float logits[max_draft_tokens];
        softmax_state state;
        for (std::uint64_t left = tree.ancestors(t); left; left &= left - 1) {
          const index_t key = std::countr_zero(left);
          float dot = 0;
          for (index_t d = 0; d < q.dim; ++d) dot += float(q.row(0, t, head)[d]) * float(k.row(0, key, kv_head)[d]);
          const bool seen = rule.visible(tree.depth(t), tree.depth(key));
          logits[key] = seen ? rule.cap(dot * scale) : -infinity;
          state.add(logits[key]);
          if (logits[key] != logits[key]) state.sum = logits[key];
        }
        float &lse = *output.lse.row(0, t, head), *out = output.out.row(0, t, head);
        const float own = state.lse(), top = (std::max)(lse, own);
        const float reference = top == -infinity ? 0.0f : top;
        const float stored = lse == -infinity ? 0.0f : std::exp(lse - reference);
        float sum = stored;
        for (index_t d = 0; d < v.dim; ++d) out[d] = stored == 0 ? 0.0f : out[d] * stored;
        for (std::uint64_t left = tree.ancestors(t); left; left &= left - 1) {
          const index_t key = std::countr_zero(left);
          if (logits[key] == -infinity) continue;
          const float weight = std::exp(logits[key] - reference);
          sum += weight;
          for (index_t d = 0; d < v.dim; ++d) out[d] += weight * float(v.row(0, key, kv_head)[d]);
        }
        const float factor = sum == 0 ? 0.0f : 1 / sum;
        for (index_t d = 0; d < v.dim; ++d) out[d] *= factor;
        lse = sum == 0 ? -infinity : reference + std::log(sum);
      },
      double(tree.tokens()) * tree.tokens() * q.heads * (q.dim + v.dim));
}

/// The rows of pending drafts.
/// Memory   fp32 rows of q, k and v of each token, by layer and sequence, while the draft is pending.
class draft_rows {
 public:
  explicit draft_rows(index_t layers) : layers_(layers), stored_(layers) {}

  /// Makes the tables long enough, and empties those of a sequence whose draft begins.
  void open(index_t id) { stored_.open_empty(id); }
  /// Needs no memory.
  void forget(index_t id) { stored_.clear(id); }

  /// Stores the rows of a layer of one sequence.
  template <class Q, class E>
  void store(sequence_layer owner, std::uint64_t number, const rows_view<const Q>& q, const rows_view<const E>& k,
             const rows_view<const E>& v) {
    layer_rows made{number, rows_of(q), rows_of(k), rows_of(v)};
    std::swap(stored_[owner], made);
  }
  /// Errors   a layer of the sequence has not had its rows of the draft: tessera::error.
  void require_all(index_t id, std::uint64_t number) const {
    for (index_t layer = 0; layer < layers_; ++layer) {
      if (stored_[sequence_layer{layer, id}].number != number)
        fail("layers of the draft of sequence " + std::to_string(id), layer, "all of the model",
             "decode the draft in every layer before it is accepted");
    }
  }
  offset_t bytes(sequence_layer owner) const {
    const layer_rows& rows = stored_[owner];
    return offset_t(sizeof(float)) *
           offset_t(rows.q.values.capacity() + rows.k.values.capacity() + rows.v.values.capacity());
  }

  /// The rows of some tokens, behind each other. A view is valid until `store` or `forget`.
  struct some_rows {
    host_vector<float> q, k, v;
    rows_view<const float> q_rows, k_rows, v_rows;
  };
  some_rows rows_of_nodes(sequence_layer owner, const host_vector<index_t>& nodes) const {
    const layer_rows& held = stored_[owner];
    some_rows made{gathered(held.q, nodes), gathered(held.k, nodes), gathered(held.v, nodes), {}, {}, {}};
    const auto view = [&](const host_vector<float>& values, const plane& of) {
      return nhd_rows<const float>(values.data(), index_t(nodes.size()), of.heads, of.dim);
    };
    made.q_rows = view(made.q, held.q), made.k_rows = view(made.k, held.k), made.v_rows = view(made.v, held.v);
    return made;
  }

 private:
  struct plane {
    host_vector<float> values;  // [tokens, heads, dim]
    index_t heads = 0, dim = 0;
  };
  struct layer_rows {
    std::uint64_t number = 0;
    plane q, k, v;
  };

  template <class E>
  static plane rows_of(const rows_view<const E>& rows) {
    plane made{{}, rows.heads, rows.dim};
    made.values.reserve(std::size_t(rows.tokens) * std::size_t(rows.heads) * std::size_t(rows.dim));
    for (index_t t = 0; t < rows.tokens; ++t) {
      for (index_t h = 0; h < rows.heads; ++h) {
        for (index_t d = 0; d < rows.dim; ++d) made.values.push_back(float(rows.row(0, t, h)[d]));
      }
    }
    return made;
  }
  static host_vector<float> gathered(const plane& from, const host_vector<index_t>& nodes) {
    host_vector<float> made;
    const offset_t row = offset_t(from.heads) * from.dim;
    made.reserve(nodes.size() * std::size_t(row));
    for (const index_t node : nodes)
      made.insert(made.end(), from.values.begin() + node * row, from.values.begin() + (node + 1) * row);
    return made;
  }

  index_t layers_;
  sequence_table<layer_rows> stored_;
};

}  // namespace cpu
TESSERA_NAMESPACE_END
