// Thread blocks that see each other's shared memory (sm_90): their barrier, and writes into another one's.
#pragma once

#include "../../../core/types.hpp"
#include "mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {
namespace detail {

/// All threads of all blocks arrive, then wait: what was written before, also to device memory, is seen behind it.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// The same, but nothing that was written before is seen behind it.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#endif
}
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// Where block `of` of the cluster has what lies at `mine` in this one's shared memory.
__device__ inline unsigned cluster_address(const void* mine, int of) {
  unsigned address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(of));
#endif
  return address;
}
__device__ inline void store_cluster(index_t* mine, int of, index_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cluster_address(mine, of)), "r"(value) : "memory");
#endif
}

/// What other blocks send is counted, in bytes, where it arrives. This needs no barrier of the cluster, whose release
/// waits until all earlier writes are seen by the whole device (MEMBAR.ALL.GPU, CUDA 13.0). Once per launch.
struct arrivals {
  alignas(8) std::uint64_t state;

  /// By one thread, before the cluster's first barrier.
  __device__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&state)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  /// By one thread: all that will have arrived in this block, which may have begun to.
  __device__ void expect(std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&state)), "r"(bytes)
                 : "memory");
#endif
  }
  /// Until it has; then it is seen.
  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n\t"
        "again:\n\t"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
        "@!done bra again;\n\t"
        "}" ::"r"(shared_address(&state))
        : "memory");
#endif
  }
};
/// Writes to where block `of` has what lies at `mine` in this one, and counts there in its `at`. 4, 8 or 16 bytes.
template <class V>
__device__ inline void send(V* mine, int of, const V& value, const arrivals& at) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
#if __CUDA_ARCH__ >= 900
  unsigned word[sizeof(V) / 4];
  __builtin_memcpy(word, &value, sizeof(V));
  const unsigned to = cluster_address(mine, of), counted = cluster_address(&at.state, of);
  if constexpr (sizeof(V) == 4) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(word[0]),
                 "r"(counted)
                 : "memory");
  } else if constexpr (sizeof(V) == 8) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(word[0]), "r"(word[1]), "r"(counted)
                 : "memory");
  } else {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(counted)
                 : "memory");
  }
#endif
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
