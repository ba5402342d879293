// What launches depend on: the device's number of multiprocessors, its shared memory and its compute capability.
#pragma once

#include <string>

#include "../../../core/config.hpp"
#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Bytes of shared memory that one block may take at most on devices of a compute capability (10 * major + minor), as
/// CUDA's programming guide says: 99 KB on the cards of workstations, 163 KB on an A100, 227 KB from an H100 on.
TESSERA_HD constexpr int shared_memory_of(int compute_capability) {
  const bool small_chip = compute_capability == 86 || compute_capability == 89 || compute_capability >= 120;
  return (small_chip ? 99 : compute_capability < 90 ? 163 : 227) * 1024;
}
/// What every device has that the library runs on.
inline constexpr int least_shared_memory = shared_memory_of(86);

/// What the host queries from a device once, outside any step.
struct device_info {
  int multiprocessors = 0;
  int compute_capability = 0;  ///< 10 * major + minor
  int shared_memory = 0;       ///< bytes that one block may use

  static device_info current() {
    int device = 0, devices = 0;
    device_info info;
    const cudaError_t found = cudaGetDeviceCount(&devices);
    require(found == cudaSuccess && devices > 0, "number of CUDA devices",
            found == cudaSuccess ? "0" : std::string("0 (") + cudaGetErrorString(found) + ")", "at least 1",
            "install the NVIDIA driver, or use the CPU backend on this machine");
    check(cudaGetDevice(&device), "cudaGetDevice");
    int major = 0, minor = 0;
    check(cudaDeviceGetAttribute(&info.multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&info.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
    info.compute_capability = 10 * major + minor;
    require(info.compute_capability >= 80, "compute capability", std::to_string(major) + "." + std::to_string(minor),
            "8.0 or newer", "use the CPU backend on this machine");
#ifdef TESSERA_TEST_CAPABILITY  // the GPU tests as on a smaller card: see cmake/gpu_tests.cmake
    info.compute_capability = TESSERA_TEST_CAPABILITY;
    info.shared_memory = shared_memory_of(TESSERA_TEST_CAPABILITY);
#endif
    return info;
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
