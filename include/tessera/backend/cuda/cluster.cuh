// Thread blocks that see each other's shared memory (sm_90): their barrier, and writes into another one's.
#pragma once

#include "../../core/types.hpp"
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
__device__ inline void store_cluster(float2* mine, int of, float2 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(cluster_address(mine, of)), "f"(value.x), "f"(value.y)
               : "memory");
#endif
}
__device__ inline void store_cluster(uint4* mine, int of, const uint4& value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address(mine, of)), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
#endif
}
__device__ inline void store_cluster(float* mine, int of, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(mine, of)), "f"(value) : "memory");
#endif
}
__device__ inline void store_cluster(index_t* mine, int of, index_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cluster_address(mine, of)), "r"(value) : "memory");
#endif
}
/// The least or most of what is there and `value`.
__device__ inline void least_of_cluster(unsigned* mine, int of, unsigned value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.min.u32 [%0], %1;" ::"r"(cluster_address(mine, of)), "r"(value)
               : "memory");
#endif
}
__device__ inline void most_of_cluster(unsigned* mine, int of, unsigned value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(cluster_address(mine, of)), "r"(value)
               : "memory");
#endif
}

}  // namespace detail
}  // namespace cuda
TESSERA_NAMESPACE_END
