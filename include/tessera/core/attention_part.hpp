// The result of attention over one part of the stored tokens, from which several parts merge into the whole.
#pragma once

#include <algorithm>
#include <span>

#include "model_shape.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// Attention of some query rows over one part of what is stored: `out` [sequences, tokens, q_heads, v_dim], each row
/// divided by its softmax sum, and its natural log-sum-exp `lse` [sequences, tokens, q_heads].
///
/// Sink logits are not in it: they enter once, where parts merge. An lse of -infinity means that the query sees nothing
/// of the part; its row of `out` is then not read. An lse of NaN makes the merged row NaN. A merge without sinks gives
/// another part.
struct attention_part {
  rows_view<const float> out;
  rows_view<const float> lse;
};

TESSERA_SHARED_NAMESPACE_END

TESSERA_NAMESPACE_BEGIN

/// Errors   negative counts, another head dim: tessera::error.
template <class Out>
void require_counts(const rows_view<Out>& out, index_t dim) {
  if ((std::min)({out.sequences, out.tokens, out.heads}) < 0) {
    fail("counts of out", shape_text(out), "at least 0 each", "pass [sequences, tokens, q_heads, dim]");
  }
  require_dim(out, dim, "out");
}

/// Checks what `merge_parts` reads and writes; `lse` may have no data.
/// Errors   no memory, negative counts, another head dim, shapes that differ: tessera::error.
template <class Out>
void require_parts(std::span<const attention_part> parts, const rows_view<Out>& out, const rows_view<float>& lse,
                   index_t dim) {
  require_counts(out, dim);
  if (!out.data) fail("out", "null", "memory for the rows", "pass the rows themselves");
  if (lse.data) require_same_shape("lse", lse, out);
  for (const attention_part& part : parts) {
    require_dim(part.out, dim, "out of a part");
    require_same_shape("out of a part", part.out, out);
    require_same_shape("lse of a part", part.lse, out);
  }
}

TESSERA_NAMESPACE_END
