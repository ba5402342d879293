// Thread blocks that can access each other's shared memory (sm_90): their barrier, and writes to another block's
// memory.
#pragma once

#include "barrier.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Arrives at the cluster's barrier; all threads of all blocks arrive, then wait. Earlier writes, also those to device
/// memory, are visible after the wait.
__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// The same, but earlier writes are not made visible.
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
/// The address in block `block` of the cluster that corresponds to `mine` in this block's shared memory.
__device__ inline unsigned cluster_address(const void* mine, int block) {
  unsigned address = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(block));
#endif
  return address;
}
/// Loads and stores of 4-byte words in other blocks.
__device__ inline unsigned load_cluster(const unsigned* mine, int block) {
  unsigned value = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(cluster_address(mine, block)) : "memory");
#endif
  return value;
}
__device__ inline void store_cluster(unsigned* mine, int block, unsigned value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster_address(mine, block)), "r"(value) : "memory");
#endif
}
__device__ inline void store_cluster(index_t* mine, int block, index_t value) {
  store_cluster(reinterpret_cast<unsigned*>(mine), block, unsigned(value));
}

/// Thread blocks that work on one row: their barrier, and access to the shared memory of the others. A single block
/// runs on sm_80 too; several blocks are a cluster.
template <int Blocks>
struct block_team {
  __device__ static int rank() { return Blocks == 1 ? 0 : int(blockIdx.x) % Blocks; }
  __device__ static void sync() {
    if constexpr (Blocks == 1) {
      __syncthreads();
    } else {
      cluster_arrive();
      cluster_wait();
    }
  }
  __device__ static unsigned load(const unsigned& mine, int block) { return load_cluster(&mine, block); }
  __device__ static void store(unsigned& mine, int block, unsigned value) { store_cluster(&mine, block, value); }
};

/// Counts, in bytes, what other blocks send to this one. It avoids the cluster's barrier, whose release waits until the
/// whole device sees all earlier writes (MEMBAR.ALL.GPU, CUDA 13.0). Used once per launch.
struct arrivals {
  alignas(8) std::uint64_t state;

  /// One thread calls it, before the cluster's first barrier.
  __device__ void begin() {
    init_barrier(shared_address(&state), 1);
    publish_barriers();
  }
  /// One thread states how many bytes will arrive in this block. Some of them may have arrived already.
  __device__ void expect(std::uint32_t bytes) { arrive_expecting(shared_address(&state), bytes); }
  /// Waits until all expected bytes have arrived. They are visible then.
  __device__ void wait() const { wait_phase_of_cluster(shared_address(&state), 0); }
};
/// Writes 4, 8 or 16 bytes to the address in block `block` that corresponds to `mine` in this one. That block's
/// `counter` counts them.
template <class V>
__device__ inline void send(V* mine, int block, const V& value, const arrivals& counter) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
#if __CUDA_ARCH__ >= 900
  unsigned word[sizeof(V) / 4];
  __builtin_memcpy(word, &value, sizeof(V));
  const unsigned to = cluster_address(mine, block), counted = cluster_address(&counter.state, block);
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

}  // namespace cuda
TESSERA_NAMESPACE_END
