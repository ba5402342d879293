#include "device.hpp"

#include <string>
#include <tessera/core/error.hpp>

#include "kv_cache.hpp"

namespace engine::cuda {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess)
    throw tessera::error(std::string(call) + " failed: " + cudaGetErrorString(status) + " (" +
                         cudaGetErrorName(status) + ")");
}

void require_device() {
  int devices = 0, device = 0, major = 0, minor = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0)
    tessera::fail("number of CUDA devices",
                  found == cudaSuccess ? "0" : std::string("0 (") + cudaGetErrorString(found) + ")", "at least 1",
                  "install the NVIDIA driver, or use --backend cpu on this machine");
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  tessera::require(major >= 8, "compute capability of the CUDA device",
                   std::to_string(major) + "." + std::to_string(minor), "8.0 or newer",
                   "use --backend cpu on this machine");
}

void* allocate(std::size_t bytes) {
  void* data = nullptr;
  if (bytes == 0 || cudaMalloc(&data, bytes) == cudaSuccess) return data;
  cudaGetLastError();  // the next call must not find this one's error
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  tessera::fail("device memory", std::to_string(bytes >> 20) + " MiB more",
                "the " + std::to_string(free >> 20) + " MiB that are free of " + std::to_string(total >> 20),
                "use a smaller model or a shorter prompt, or free memory on the device");
}

captured_steps::step& captured_steps::of(std::uint64_t model, int tokens, int actions) {
  for (step& known : steps_)
    if (known.model == model && known.tokens == tokens && known.actions == actions) return known;
  return steps_.emplace_back(step{model, tokens, actions});
}

void captured_steps::clear() {
  for (const step& known : steps_)
    if (known.graph) cudaGraphExecDestroy(known.graph);
  steps_.clear();
}

}  // namespace engine::cuda
