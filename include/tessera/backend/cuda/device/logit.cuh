// From logits to outputs on the device: soft caps, and the weight of a row.
#pragma once

#include "../../../core/logit_rule.hpp"
#include "../../../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

inline constexpr float log2e = 1.44269504088896341f, ln2 = 0.693147180559945309f;

/// `rule.cap`, without the many instructions of tanh: its error is 1e-7 of the cap.
__device__ __forceinline__ float quick_cap(const logit_rule& rule, float scaled) {
  if (rule.soft_cap <= 0) return scaled;
  const float twice = power_of_two(scaled * __fdividef(2 * log2e, rule.soft_cap));
  return rule.soft_cap - 2 * rule.soft_cap * __fdividef(1.0f, 1.0f + twice);
}

/// The weight that turns a row's summed output into its output, from its largest logit and its sum, both in base 2.
/// Writes the row's log-sum-exp where the caller gives memory for it.
__device__ inline float output_weight(const logit_rule& rule, index_t q_head, float max2, float sum, float* lse) {
  float top = max2, factor = 1;
  if (rule.sink_logits) {
    const float sink = rule.sink_logits[q_head] * log2e;
    top = fmaxf(max2, sink);
    factor = exp2f(max2 - top);
    sum = sum * factor + exp2f(sink - top);
  }
  if (lse) *lse = sum == 0 ? -infinity : (top + log2f(sum)) * ln2;
  return sum == 0 ? 0.0f : factor / sum;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
