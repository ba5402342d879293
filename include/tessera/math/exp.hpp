// exp for inner loops: no branches, no table, so a loop over it vectorises without -ffast-math.
#pragma once

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

#ifdef __CUDACC__
/// 2^x by the device's instruction; 0 below the normal range.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
#endif

/// e^x to within 2 ulp for x in [-87, 88]; 0 below -87.3 (never a subnormal), +inf above 88.7; NaN gives NaN.
/// glibc's expf is a call per element, which made softmax half of the CPU prefill's time (EPYC, g++ 12).
/// On the device it is the machine's 2^x instruction: some ulp more, 27 % less time in window scoring (H200, CUDA
/// 13.0).
TESSERA_HD TESSERA_INLINE float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  return power_of_two(x * 1.44269504f);
#else
  const float clamped = x < -87.3365f ? -87.3365f : (x > 88.7228f ? 88.7228f : x);
  // n = round(x / ln 2) by adding and removing 1.5 * 2^23; the remainder is reduced with ln 2 in two parts.
  const float shifted = clamped * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  float r = clamped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // 2^n in two halves: n reaches 128 at the top of the range, one more than an exponent holds.
  const std::int32_t exponent = bits_as<std::int32_t>(shifted) - 0x4b400000;
  const std::int32_t half = exponent >> 1;
  const float scale_a = bits_as<float>((half + 127) << 23);
  const float scale_b = bits_as<float>((exponent - half + 127) << 23);
  const float result = p * scale_a * scale_b;
  return x < -87.3365f ? 0.0f : (x > 88.7228f ? infinity : result);
#endif
}

TESSERA_NAMESPACE_END
