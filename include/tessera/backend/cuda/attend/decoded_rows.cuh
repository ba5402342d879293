// Encoded rows on their way to shared memory, for kernels that compute with them as 16-bit elements.
#pragma once

#include "../device/mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// Eight stored elements times their row's scale, as 16 bytes at the shared address `to`; zeros where not valid. An
/// ordinary store: others see it after the next barrier.
template <class T, class Stored>
__device__ __forceinline__ void store_decoded(std::uint32_t to, const Stored* from, bool valid, float scale) {
  std::uint32_t pairs[4] = {};
  if (valid) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack_pair<T>(float(from[i * 2]) * scale, float(from[i * 2 + 1]) * scale);
    }
  }
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]),
               "r"(pairs[3])
               : "memory");
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
