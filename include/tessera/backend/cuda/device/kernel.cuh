// Kernels: their configuration, size and launch, also launches that overlap with their neighbours on the stream
// (programmatic dependent launch, sm_90).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "../../../core/types.hpp"
#include "tuning.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Waits until everything earlier on the stream is done and its writes are visible. Every thread of a kernel that is
/// launched with `overlapping` must call it before it reads what an earlier launch may have written, and before it
/// writes any device memory, its scratch included. Earlier it may use only parameters and shared memory. Below sm_90 it
/// does nothing.
__device__ __forceinline__ void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next launch of the stream begin once every block has called this or has ended. The next launch sees this
/// launch's writes only when this launch has ended. Blocks that begin early use free registers and shared memory.
__device__ __forceinline__ void let_later_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Loads a __grid_constant__ parameter into the constant cache, a line of 64 bytes at a time. Call it before
/// `wait_for_earlier`: while earlier launches run, it hides the misses that the first uses would wait for.
template <class P>
__device__ __forceinline__ void touch_parameter(const P& p) {
#pragma unroll
  for (std::size_t i = 0; i < sizeof(P); i += 64) {
    asm volatile("" ::"r"(*reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const unsigned char*>(&p) + i)));
  }
}

/// Whether launches of `entry` may overlap: its code must be compiled for sm_90 or newer. In older code the wait above
/// does nothing, even if the driver compiles that code for a newer device.
template <class... Params>
bool can_overlap(void (*entry)(Params...)) {
  cudaFuncAttributes compiled{};
  check(cudaFuncGetAttributes(&compiled, entry), "cudaFuncGetAttributes");
  return compiled.ptxVersion >= 90;
}

/// How a kernel is launched. It works in streams and in captures alike.
struct launch_shape {
  dim3 blocks, threads;
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;  ///< blocks in a cluster; 1: no clusters
  /// Begins while the previous launch ends. Needs `can_overlap` and a kernel that calls `wait_for_earlier`.
  bool overlapping = false;
};

namespace detail {

/// A launch in the form that the driver takes. It contains pointers to itself, so it must not move.
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

/// A small launch that overlaps with its neighbours if its code can. `Entry` must call `wait_for_earlier`. Between
/// launches that do not overlap, a stream idles for 1 to 2 us.
template <auto Entry, class... Args>
void launch_overlapping(dim3 blocks, unsigned threads, cudaStream_t stream, const char* call, Args&&... args) {
  static const bool can = can_overlap(Entry);
  launch(Entry, {.blocks = blocks, .threads = dim3(threads), .overlapping = can}, stream, call,
         std::forward<Args>(args)...);
}

/// The problems of one launch. The launch reads them from its parameters, so the caller need not keep them until it
/// runs.
template <class Problem>
struct problem_list {
  static constexpr int capacity = 32;
  Problem problems[capacity];
};
/// Calls run(list, count) for every 32 of the `count` problems; the last call may have fewer.
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

/// A kernel whose shared memory and occupancy matter. The constructor stores the kernel, so that the same kernel is
/// configured and launched: nvcc gives every source file a kernel of its own, and a member function may come from
/// another source file than the constructor.
template <class... Params>
class device_kernel {
 public:
  device_kernel() = default;
  device_kernel(void (*entry)(Params...)) : entry_(entry) {
    check(cudaFuncGetAttributes(&compiled_, entry), "cudaFuncGetAttributes");
  }

  explicit operator bool() const { return entry_ != nullptr; }
  /// See `can_overlap`; clusters need it too.
  bool overlaps() const { return compiled_.ptxVersion >= 90; }
  /// 10 * major + minor of the architecture that the kernel was compiled for. The kernel depends on it and not on the
  /// device: newer devices run older code.
  int architecture() const { return compiled_.ptxVersion; }
  /// The bound on a block's threads that it was compiled with. It distinguishes kernels that differ by architecture.
  int max_threads() const { return compiled_.maxThreadsPerBlock; }
  /// Bytes that a launch may request in addition to the kernel's static shared memory.
  std::size_t shared_limit(const device_info& device) const {
    return std::size_t((std::max)(0, device.shared_memory - int(compiled_.sharedSizeBytes)));
  }

  /// Lets launches request all of these bytes, and returns whether they are at least `wanted`. The limit belongs to the
  /// kernel, and another object may need more than this one.
  bool allow_shared(std::size_t wanted, const device_info& device) const {
    const std::size_t limit = shared_limit(device);
    if (wanted > limit) return false;
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributeMaxDynamicSharedMemorySize, int(limit)),
          "cudaFuncSetAttribute");
    return true;
  }
  /// Errors   the device has fewer than `wanted` bytes: tessera::error that names the kernel.
  void require_shared(std::size_t wanted, const device_info& device, const std::string& name,
                      const char* cure =
                          "lower cache_options::tokens, or what else the operation is made for, or use "
                          "a device with more of it") const {
    if (allow_shared(wanted, device)) return;
    fail("shared memory of a block of " + name, std::to_string(wanted) + " bytes",
         "at most " + std::to_string(shared_limit(device)) + " bytes on this device", cure);
  }
  /// Prefers the largest shared memory. Neighbouring launches use it too, so a multiprocessor need not change its
  /// split.
  void prefer_shared() const {
    check(cudaFuncSetAttribute(entry_, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
          "cudaFuncSetAttribute");
  }

  /// How many blocks the device runs at a time, at least one on each multiprocessor.
  int resident_blocks(int threads, std::size_t shared_bytes, const device_info& device) const {
    int blocks = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, entry_, threads, shared_bytes),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    return (std::max)(1, blocks) * device.multiprocessors;
  }
  /// How many clusters of such a launch the device runs at a time. This is fewer than all multiprocessors together
  /// could hold: a cluster lies within one group of multiprocessors, and groups differ in size, also between devices of
  /// one name.
  int resident_clusters(const launch_shape& shape) const {
    const detail::launch_config made(shape);
    int clusters = 0;
    check(cudaOccupancyMaxActiveClusters(&clusters, entry_, &made.config), "cudaOccupancyMaxActiveClusters");
    return clusters;
  }

  template <class... Args>
  void launch(const launch_shape& shape, cudaStream_t stream, const char* call, Args&&... args) const {
    cuda::launch(entry_, shape, stream, call, std::forward<Args>(args)...);
  }

 private:
  void (*entry_)(Params...) = nullptr;
  cudaFuncAttributes compiled_{};
};

}  // namespace cuda
TESSERA_NAMESPACE_END
