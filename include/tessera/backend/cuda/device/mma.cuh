// The few PTX instructions that the kernels are made of: asynchronous copies, matrix loads and 16x8x16 products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../../core/config.hpp"
#include "../../../core/logit_rule.hpp"
#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return std::uint32_t(__cvta_generic_to_shared(p));
}

/// Copies 16 bytes from global to shared memory without waiting, past L1; zeros when `valid` is false.
__device__ __forceinline__ void copy_async16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}

/// A policy for data that is read once: it is the first to leave the L2, so that what is read again stays.
__device__ __forceinline__ std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// `copy_async16` under an L2 policy.
__device__ __forceinline__ void copy_async16(std::uint32_t to, const void* from, bool valid, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
/// Asks for the 128 bytes around `p` to come to the L2.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// Turns an 8x8 matrix of 16-bit elements that a warp holds, two neighbours of row l / 4 on lane l.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t matrix) {
  std::uint32_t turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(matrix));
  return turned;
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// acc [16, 8] += a [16, 16] b [16, 8], fp32 accumulation.
template <class T>
__device__ __forceinline__ void multiply(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// 2^x by the machine's instruction; 0 below the normal range.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// `rule.cap`, without the many instructions of tanh: its error is 1e-7 of the cap.
__device__ __forceinline__ float quick_cap(const logit_rule& rule, float scaled) {
  if (rule.soft_cap <= 0) return scaled;
  const float twice = power_of_two(scaled * __fdividef(2 * 1.44269504088896341f, rule.soft_cap));
  return rule.soft_cap - 2 * rule.soft_cap * __fdividef(1.0f, 1.0f + twice);
}

/// The weight that turns a row's summed output into its output, from its largest logit and sum, both in base 2; writes
/// its log-sum-exp where there is room for it.
__device__ inline float output_weight(const logit_rule& rule, index_t q_head, float max2, float sum, float* lse) {
  constexpr float log2e = 1.44269504088896341f;
  float top = max2, factor = 1;
  if (rule.sink_logits) {
    const float sink = rule.sink_logits[q_head] * log2e;
    top = fmaxf(max2, sink);
    factor = exp2f(max2 - top);
    sum = sum * factor + exp2f(sink - top);
  }
  if (lse) *lse = sum == 0 ? -infinity : (top + log2f(sum)) * 0.693147180559945309f;
  return sum == 0 ? 0.0f : factor / sum;
}

/// Two fp32 values as one register of two 16-bit elements, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  if constexpr (std::is_same_v<T, bf16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
