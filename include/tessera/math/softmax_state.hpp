// Softmax over parts: running maximum and sum, and the merge of partial attention results by log-sum-exp.
#pragma once

#include <cmath>

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Maximum and sum of exp(logit - maximum) of the logits seen so far. Default-constructed: nothing seen.
struct softmax_state {
  float max = -infinity;
  float sum = 0;

  TESSERA_HD bool empty() const { return max == -infinity; }

  TESSERA_HD void add(float logit) { merge({logit, logit == -infinity ? 0.0f : 1.0f}); }

  /// Commutative up to rounding; an empty side changes nothing.
  TESSERA_HD void merge(const softmax_state& other) {
    if (other.empty()) return;
    if (empty()) {
      *this = other;
      return;
    }
    const float top = max > other.max ? max : other.max;
    sum = sum * std::exp(max - top) + other.sum * std::exp(other.max - top);
    max = top;
  }

  /// Natural log of the sum of exponentials; -infinity when nothing was seen.
  TESSERA_HD float log_sum_exp() const { return empty() ? -infinity : max + std::log(sum); }
  /// The same, but NaN where the sum is: a row of nothing but NaN has no maximum.
  TESSERA_HD float lse() const { return sum != sum ? sum : log_sum_exp(); }

  /// Ends a row: its head's sink logit (null: none) adds to the sum and nothing to the output, and does not hide a NaN.
  /// Returns the factor by which the row's summed output becomes its output; 0 if nothing was seen.
  TESSERA_HD float close(const float* sink_logits, index_t q_head) {
    float scale = 1;
    if (sink_logits && sum == sum) {
      const float before = max;
      merge({sink_logits[q_head], 1.0f});
      scale = before == -infinity ? 0.0f : std::exp(before - max);
    }
    return sum == 0 ? 0.0f : scale / sum;
  }
};

/// Merges two normalised partial attention results over disjoint keys into the first.
/// Shapes   out_a, out_b [dim].   Log-sum-exps are natural logs; -infinity marks an empty part, whose output is
///          ignored.
TESSERA_HD inline void merge_attention(float* out_a, float& lse_a, const float* out_b, float lse_b, int dim) {
  if (lse_b == -infinity) return;
  if (lse_a == -infinity) {
    for (int d = 0; d < dim; ++d) out_a[d] = out_b[d];
    lse_a = lse_b;
    return;
  }
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float a = std::exp(lse_a - top), b = std::exp(lse_b - top), total = a + b;
  for (int d = 0; d < dim; ++d) out_a[d] = (out_a[d] * a + out_b[d] * b) / total;
  lse_a = top + std::log(total);
}

/// Converts a log-sum-exp of an engine that works in base 2 (exp2 kernels) to the natural log used everywhere here.
TESSERA_HD inline float natural_lse_from_base2(float lse2) { return lse2 * 0.693147180559945309f; }

TESSERA_NAMESPACE_END
