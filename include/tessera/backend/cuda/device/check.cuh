// Every CUDA call goes through one checker that keeps the call's text.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "../../../core/error.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Throws tessera::error with the call and the driver's reason unless `status` is success.
inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    throw error(std::string(call) + " failed: " + cudaGetErrorString(status) + " (" + cudaGetErrorName(status) + ")");
  }
}

}  // namespace cuda
TESSERA_NAMESPACE_END
