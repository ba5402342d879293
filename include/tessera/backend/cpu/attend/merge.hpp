// The merge of partial attention results on the CPU, where sink logits enter once.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "../../../core/attention_part.hpp"
#include "../../../core/host/float_mode.hpp"
#include "../../../math/softmax_state.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {
namespace detail {

/// Divides a row by its softmax sum, sink logit included (null: no sink), and writes output and log-sum-exp.
template <int Dv>
void finish_row(const float* sink, softmax_state state, const float* from, float* out, float* lse) {
  const float factor = state.close(sink, 0);
  for (int d = 0; d < Dv; ++d) out[d] = from[d] * factor;
  if (lse) *lse = state.lse();
}

/// Merges `count` parts of one row, in order: part i has the softmax state `state(i)` and the row `row(i)`, which its
/// state's sum divides. Rows of empty parts are not read.
template <int Dv, class State, class Row>
void merge_row(index_t count, const State& state, const Row& row, const float* sink, float* out, float* lse) {
  softmax_state total;
  bool poisoned = false;  // a part of only NaN has no maximum, and would otherwise be taken for an empty part
  for (index_t i = 0; i < count; ++i) {
    poisoned |= state(i).sum != state(i).sum;
    total.merge(state(i));
  }
  float merged[Dv] = {};
  for (index_t i = 0; i < count; ++i) {
    if (state(i).empty()) continue;
    const float weight = std::exp(state(i).max - total.max);
    const float* from = row(i);
    for (int d = 0; d < Dv; ++d) merged[d] += from[d] * weight;
  }
  if (poisoned) total.sum = std::numeric_limits<float>::quiet_NaN();
  finish_row<Dv>(sink, total, merged, out, lse);
}

}  // namespace detail

/// Merges attention over parts of the stored tokens into attention over all of them.
///
/// Shapes   parts as attention_part, any number of them, rows of Dim; out [sequences, tokens, q_heads, Dim],
///          lse [sequences, tokens, q_heads], or no data; sink_logits [q_heads], or null.
/// Returns  the rows' softmax over all parts and the sink, by their log-sum-exps. Sink logits add to the sums only
///          here. A row that no part sees gives 0 and -infinity, or the sink's logit. A NaN of any part stays NaN.
///          Parts are added in order: same input, same bits. `out` and `lse` may be one of the parts.
/// Errors   shapes that differ, no lse in a part: tessera::error, before anything is written.
template <int Dim>
void merge_parts(std::span<const attention_part> parts, const float* sink_logits, const rows_view<float>& out,
                 const rows_view<float>& lse) {
  const default_float_mode mode;
  require_parts(parts, out, lse, Dim);
  for (index_t b = 0; b < out.sequences; ++b) {
    for (index_t t = 0; t < out.tokens; ++t) {
      for (index_t h = 0; h < out.heads; ++h) {
        const auto state = [&](index_t i) -> softmax_state {
          const float part = *parts[std::size_t(i)].lse.row(b, t, h);
          if (part != part) return {-infinity, part};
          return {part, part == -infinity ? 0.0f : 1.0f};
        };
        detail::merge_row<Dim>(
            index_t(parts.size()), state, [&](index_t i) { return parts[std::size_t(i)].out.row(b, t, h); },
            sink_logits ? sink_logits + h : nullptr, out.row(b, t, h), lse.data ? lse.row(b, t, h) : nullptr);
      }
    }
  }
}

}  // namespace cpu
TESSERA_NAMESPACE_END
