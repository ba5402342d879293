// The result of attention over one part of the stored tokens, from which several parts merge into the whole.
#pragma once

#include "views.hpp"

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
