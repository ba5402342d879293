#include "ops.hpp"

namespace engine::cuda {
namespace {

constexpr std::size_t workspace_bytes = std::size_t(32) << 20;  // what cuBLAS recommends for Hopper

}  // namespace

products::products(cudaStream_t stream) : stream_(stream), cublas_(cublas::loaded()), workspace_(workspace_bytes) {
  cublas_.check(cublas_.create(&handle_), "cublasCreate");
  cublas_.check(cublas_.set_stream(handle_, stream), "cublasSetStream");
  // After the stream: setting that one resets the workspace.
  cublas_.check(cublas_.set_workspace(handle_, workspace_.data(), workspace_.bytes()), "cublasSetWorkspace");
}

products::~products() { cublas_.destroy(handle_); }

void products::linear(const bf16* x, std::int32_t rows, const weight_matrix& weight, float* y, write how) {
  if (matrix_vectors(x, rows, weight, y, how == write::add, stream_)) return;
  const float alpha = 1, beta = how == write::add ? 1 : 0;
  // cuBLAS counts by columns: y^T = W x^T, where a row-major W is the transpose of a column-major one.
  cublas_.check(cublas_.gemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, weight.outputs, rows, weight.inputs, &alpha,
                             weight.values.data(), CUDA_R_16BF, weight.inputs, x, CUDA_R_16BF, weight.inputs, &beta, y,
                             CUDA_R_32F, weight.outputs, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                "cublasGemmEx");
}

void products::linear(const float* x, std::int32_t rows, const weight_matrix& weight, float* y, bf16* rounded) {
  if (matrix_vectors(x, rows, weight, y, true, stream_)) return;
  round_to_bf16(x, std::int64_t(rows) * weight.inputs, rounded, stream_);
  linear(rounded, rows, weight, y, write::add);
}

}  // namespace engine::cuda
