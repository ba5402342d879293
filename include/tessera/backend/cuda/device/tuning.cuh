// What launches depend on: the device's number of multiprocessors, its shared memory and its compute capability.
#pragma once

#include <string>

#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

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
    return info;
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
