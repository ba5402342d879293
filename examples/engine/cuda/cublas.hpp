// cuBLAS, loaded when a model is first put on a device: it is 600 MB, of which most of the tool's commands need nothing.
#pragma once

#include <cublas_v2.h>

#include <string>
#include <tessera/core/error.hpp>

namespace engine::cuda {

/// The functions that `products` calls.
struct cublas {
  decltype(&cublasCreate_v2) create;
  decltype(&cublasDestroy_v2) destroy;
  decltype(&cublasSetStream_v2) set_stream;
  decltype(&cublasSetWorkspace_v2) set_workspace;
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int m, int n, int k, const void* alpha,
                         const void* a, cudaDataType, int lda, const void* b, cudaDataType, int ldb, const void* beta,
                         void* c, cudaDataType, int ldc, cublasComputeType_t, cublasGemmAlgo_t);
  decltype(&cublasGetStatusString) status_string;

  /// Errors: the library is not there, or has not these functions.
  static const cublas& loaded();

  /// Throws tessera::error with the call and the library's reason unless it succeeded.
  void check(cublasStatus_t status, const char* call) const {
    if (status != CUBLAS_STATUS_SUCCESS) throw tessera::error(std::string(call) + " failed: " + status_string(status));
  }
};

}  // namespace engine::cuda
