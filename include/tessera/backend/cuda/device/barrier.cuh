// Barriers in shared memory that count arrivals, and flags in device memory.
#pragma once

#include "copy.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A numbered barrier of a given number of threads. Some wait at it, others only arrive.
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// A barrier whose threads may be at different lines of the code. __syncthreads requires all threads of a block at one
/// line, and so does bar.sync when it counts all of them (compute-sanitizer's synccheck).
template <int Number, int Threads>
struct numbered_barrier {
  __device__ static void wait() { asm volatile("barrier.sync %0, %1;" ::"n"(Number), "n"(Threads) : "memory"); }
};

/// A barrier in shared memory, named by its address there. It counts arriving threads and bytes, and its phase flips
/// each time the count is complete. One thread initialises it, then the block synchronises. If other blocks of a
/// cluster or the copy engine count there, call `publish_barriers` before that synchronisation.
__device__ __forceinline__ void init_barrier(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// Makes initialised barriers visible after the next barrier of the block or the cluster.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives once the asynchronous copies that this thread has issued are complete.
__device__ __forceinline__ void arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/// Arrives, and lets the phase end only when this many bytes have arrived too.
__device__ __forceinline__ void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
/// Whether the phase of this parity has ended.
__device__ __forceinline__ bool phase_ended(std::uint32_t barrier, std::uint32_t parity) {
  int ended = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return ended != 0;
}
/// Waits until the phase of this parity has ended. What arrived from this block is visible then.
__device__ __forceinline__ void wait_phase(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}
/// The same; what other blocks of the cluster sent is visible too.
__device__ __forceinline__ void wait_phase_of_cluster(std::uint32_t barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

/// Flags and counters in device memory, for communication between blocks. They do what ::cuda::atomic_ref does, without
/// the 2.5 seconds that its header adds to every compilation (decision 0011).
__device__ __forceinline__ unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned* to, unsigned value) {
  asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
/// Adds and returns the previous value. A thread that reads the sum sees this thread's earlier writes, and this thread
/// sees those of the threads that added before it.
__device__ __forceinline__ unsigned add_acquire_release(unsigned* to, unsigned value) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
