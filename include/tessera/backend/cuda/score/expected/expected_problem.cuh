// What the kernels of Expected Attention share: what they read and write, and sums of exponentials.
#pragma once

#include <cuda_fp16.h>

#include "moments.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// The exponentials of some logits, beside the largest of them. A NaN has no part in it.
struct exp_sum {
  float most, sum;  // of none: -infinity and 0

  __device__ void add(float logit) {
    if (!(logit > -infinity)) return;
    if (logit > most) {
      sum = sum * expf(most - logit) + 1;
      most = logit;
    } else {
      sum += expf(logit - most);
    }
  }
  __device__ void add(const exp_sum& other) {
    if (other.most == -infinity) return;
    const float larger = fmaxf(most, other.most);
    sum = (most == -infinity ? 0 : sum * expf(most - larger)) + other.sum * expf(other.most - larger);
    most = larger;
  }
};

template <class View>
struct expected_problem {
  using T = typename View::element_type;
  View view;  // values are not read
  moment_rows<T> moments;
  float scale;
  float* logits;      // [sequences, q_heads, capacity]
  exp_sum* partials;  // [sequences, q_heads, blocks]
  index_t group, capacity;
};

/// Two neighbours of a row as fp32.
template <class T>
__device__ __forceinline__ float2 unpacked_pair(std::uint32_t bits) {
  if constexpr (std::is_same_v<T, bf16>) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  }
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
