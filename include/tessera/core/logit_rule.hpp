// How a dot product becomes an attention logit, and which keys a query may see.
#pragma once

#include <cmath>

#include "config.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Scale, soft cap, masks and sinks of one layer's attention. Scorers and attention use the same rule, so that scores
/// describe the attention that is computed.
///
/// logit = cap * tanh(scale * q.k / cap) with a soft cap, else scale * q.k. A key at position p is visible to a query
/// at position t when p <= t and, with a sliding window, t - p < sliding_window. A learned sink logit (gpt-oss) adds
/// exp(sink) to the softmax denominator of its query head and nothing to the output.
struct logit_rule {
  float scale = 0;                     ///< 0 means 1 / sqrt(k_dim)
  float soft_cap = 0;                  ///< 0 means none
  index_t sliding_window = 0;          ///< in positions; 0 means none
  const float* sink_logits = nullptr;  ///< [q_heads]; null means none

  TESSERA_HD float scale_for(int k_dim) const { return scale != 0 ? scale : 1.0f / std::sqrt(float(k_dim)); }

  /// `scaled` is scale * q.k.
  TESSERA_HD float cap(float scaled) const { return soft_cap > 0 ? soft_cap * std::tanh(scaled / soft_cap) : scaled; }

  TESSERA_HD bool visible(index_t query_position, index_t key_position) const {
    return key_position <= query_position && (sliding_window <= 0 || query_position - key_position < sliding_window);
  }
};

TESSERA_NAMESPACE_END
