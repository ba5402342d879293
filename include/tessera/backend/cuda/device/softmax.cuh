// From logits to outputs on the device: soft caps, partial softmax and its merges, sink logits, and the factor of a
// row.
#pragma once

#include "../../../core/logit_rule.hpp"
#include "../../../math/exp.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

inline constexpr float log2e = 1.44269504088896341f, ln2 = 0.693147180559945309f;

/// `rule.cap`, without the many instructions of tanh. Its error is 1e-7 of the cap.
__device__ __forceinline__ float quick_cap(const logit_rule& rule, float scaled) {
  if (rule.soft_cap <= 0) return scaled;
  const float twice = power_of_two(scaled * __fdividef(2 * log2e, rule.soft_cap));
  return rule.soft_cap - 2 * rule.soft_cap * __fdividef(1.0f, 1.0f + twice);
}

// A part of a row's softmax has its largest logit, the sum of 2^(logit - largest), and the sum of the values with these
// weights. Logits are in base 2 unless stated otherwise. The functions below serve both kernels with one number per row
// and the fragments of matrix products.

/// The reference of a part's exponents: its largest logit, or 0 if it has none. So -infinity minus the reference is not
/// NaN, and the weights are 0.
__device__ __forceinline__ float softmax_reference(float largest) { return largest == -infinity ? 0.0f : largest; }

/// How a part's largest logit rises when others join it.
struct softmax_rise {
  float largest, reference;
  float shrink;  ///< the factor of the part's sum and values

  __device__ __forceinline__ softmax_rise(float before, float joining)
      : largest(fmaxf(before, joining)),
        reference(softmax_reference(largest)),
        shrink(power_of_two(before - reference)) {}
  /// The weight of a logit that joins, or the factor of a part whose largest logit this is.
  __device__ __forceinline__ float weight(float logit) const { return power_of_two(logit - reference); }
};

/// Adds the sum of another part. Both parts begin with a finite number below every logit, and need no reference.
__device__ __forceinline__ void join_sums(float& largest, float& sum, float other_largest, float other_sum) {
  const float top = fmaxf(largest, other_largest);
  sum = sum * power_of_two(largest - top) + other_sum * power_of_two(other_largest - top);
  largest = top;
}

/// A part over natural logits, which are added one by one. NaN is left out.
struct exp_sum {
  float largest, sum;  // without logits: -infinity and 0

  __device__ void add(float logit) {
    if (!(logit > -infinity)) return;
    if (logit > largest) {
      sum = sum * expf(largest - logit) + 1;
      largest = logit;
    } else {
      sum += expf(logit - largest);
    }
  }
  __device__ void add(const exp_sum& other) {
    if (other.largest == -infinity) return;
    const float larger = fmaxf(largest, other.largest);
    sum = (largest == -infinity ? 0 : sum * expf(largest - larger)) + other.sum * expf(other.largest - larger);
    largest = larger;
  }
};

/// The factor that turns a row's summed output into its output, computed from the row's largest logit and its sum. A
/// sink logit is added to both. Writes the row's log-sum-exp if the caller gives memory for it. A row without logits
/// gives 0 and -infinity.
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
