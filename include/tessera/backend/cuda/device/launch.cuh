// Launches that overlap with their neighbours on the stream (programmatic dependent launch, sm_90).
#pragma once

#include <cstdint>
#include <utility>

#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Waits until everything earlier on the stream is done and its writes are visible. Every thread of a kernel that is
/// launched with `overlapping` calls it before it reads what an earlier launch may have written, and before it writes
/// anything, its scratch included. Only parameters and shared memory may be touched earlier. It does nothing below
/// sm_90.
__device__ __forceinline__ void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next launch of the stream begin once every block has called this or has ended. What this launch writes is
/// visible to the next one only when this one has ended. Blocks that begin early use free registers and shared
/// memory.
__device__ __forceinline__ void let_later_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Brings a __grid_constant__ parameter to the constant cache, a line of 64 bytes at a time. Called before
/// `wait_for_earlier`, where earlier launches hide the misses that the first uses would wait for.
template <class P>
__device__ __forceinline__ void touch_parameter(const P& p) {
#pragma unroll
  for (std::size_t i = 0; i < sizeof(P); i += 64) {
    asm volatile("" ::"r"(*reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const unsigned char*>(&p) + i)));
  }
}

/// Whether launches of `entry` may overlap: its code was compiled for sm_90 or newer. Older code lacks the wait above,
/// also where the driver compiles it for a newer device.
template <class... Params>
bool can_overlap(void (*entry)(Params...)) {
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, entry), "cudaFuncGetAttributes");
  return compiled.ptxVersion >= 90;
}

/// How a kernel is launched; plain in streams and in captures.
struct launch_shape {
  dim3 blocks, threads;
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;  ///< blocks; 1: no clusters
  /// Begins while the previous launch ends. Needs `can_overlap` and a kernel that calls `wait_for_earlier`.
  bool overlapping = false;
};

namespace detail {

/// A launch as the driver takes it. It points to itself, so it does not move.
struct launch_config {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  explicit launch_config(const launch_shape& shape, cudaStream_t stream = nullptr) {
    config.gridDim = shape.blocks;
    config.blockDim = shape.threads;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (shape.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.overlapping) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
  }
  launch_config(const launch_config&) = delete;
  launch_config& operator=(const launch_config&) = delete;
};

}  // namespace detail

/// Errors   tessera::error with `call` and the driver's reason.
template <class... Params, class... Args>
void launch(void (*entry)(Params...), const launch_shape& shape, cudaStream_t stream, const char* call,
            Args&&... args) {
  const detail::launch_config made(shape, stream);
  check(cudaLaunchKernelEx(&made.config, entry, std::forward<Args>(args)...), call);
}

/// A small launch that overlaps with its neighbours where its code can; `Entry` calls `wait_for_earlier`. Between
/// launches that do not overlap a stream idles for 1 to 2 us.
template <auto Entry, class... Args>
void launch_overlapping(dim3 blocks, unsigned threads, cudaStream_t stream, const char* call, Args&&... args) {
  static const bool can = can_overlap(Entry);
  launch(Entry, {.blocks = blocks, .threads = dim3(threads), .overlapping = can}, stream, call,
         std::forward<Args>(args)...);
}

/// Problems of one launch. The launch reads them from its parameters, so nobody has to keep them until it runs.
template <class Problem>
struct problem_list {
  static constexpr int capacity = 32;
  Problem problems[capacity];
};
/// Calls run(list, count) for every 32 of `count` problems, or fewer at the end.
template <class Problem, class Run>
void in_lists(const Problem* problems, std::size_t count, const Run& run) {
  static_assert(sizeof(problem_list<Problem>) <= 30000, "tessera: a launch takes parameters of 32,764 bytes");
  for (std::size_t first = 0; first < count; first += problem_list<Problem>::capacity) {
    problem_list<Problem> list{};
    const std::size_t some = count - first < list.capacity ? count - first : list.capacity;
    for (std::size_t i = 0; i < some; ++i) list.problems[i] = problems[first + i];
    run(list, index_t(some));
  }
}

/// How many clusters of such a launch the device runs at a time. They are fewer than all multiprocessors could hold: a
/// cluster lies within one group of multiprocessors, and groups differ, also between devices of one name.
template <class... Params>
int resident_clusters(void (*entry)(Params...), const launch_shape& shape) {
  const detail::launch_config made(shape);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, entry, &made.config), "cudaOccupancyMaxActiveClusters");
  return clusters;
}

}  // namespace cuda
TESSERA_NAMESPACE_END
