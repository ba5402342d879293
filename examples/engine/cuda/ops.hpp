// The layer operations of a Llama model on the device. All tensors are contiguous, row by row.
#pragma once

#include <cstdint>

#include "cublas.hpp"
#include "device.hpp"
#include "engine/config.hpp"
#include "kv_cache.hpp"

namespace engine::cuda {

/// A weight matrix [outputs, inputs] on the device, as checkpoints store it.
struct weight_matrix {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  device_array<bf16> values;
};

/// Matrix products, of more than a few rows through cuBLAS, on one stream. They can be captured: the workspace is set once.
class products {
 public:
  explicit products(cudaStream_t stream);
  products(const products&) = delete;
  ~products();

  enum class write { replace, add };

  /// y = x W^T, or y += x W^T, summed in fp32. Shapes: x [rows, W.inputs], y [rows, W.outputs].
  void linear(const bf16* x, std::int32_t rows, const weight_matrix& weight, float* y, write how = write::replace);

  /// y += x W^T for an fp32 x; what goes to cuBLAS is rounded to bf16 first, into `rounded` of the same shape.
  void linear(const float* x, std::int32_t rows, const weight_matrix& weight, float* y, bf16* rounded);

 private:
  cudaStream_t stream_;
  const cublas& cublas_;
  cublasHandle_t handle_ = nullptr;
  device_array<std::byte> workspace_;
};

/// Rows that `matrix_vectors` takes; more are cuBLAS's.
inline constexpr std::int32_t most_vector_rows = 4;

/// y = x W^T or y += x W^T for up to `most_vector_rows` rows x, bf16 or fp32, at about the speed of reading W. Returns
/// false where the shape does not fit: W.inputs must be a multiple of 8.
template <class X>
bool matrix_vectors(const X* x, std::int32_t rows, const weight_matrix& weight, float* y, bool add,
                    cudaStream_t stream);

/// Rows of the embedding. Shapes: tokens [rows], embedding [vocab, width], out [rows, width].
void gather_rows(const token_t* tokens, std::int32_t rows, const weight_matrix& embedding, float* out,
                 cudaStream_t stream);

/// y = x / rms(x) * weight, per row. Shapes: x, y [rows, width], weight [width].
void rms_norm(const float* x, std::int32_t rows, std::int32_t width, const float* weight, float eps, bf16* y,
              cudaStream_t stream);

/// y = silu(gate) * up. Shapes: gate_up [rows, 2 * width], gate in the first half of a row; y [rows, width].
void swiglu(const float* gate_up, std::int32_t rows, std::int32_t width, bf16* y, cudaStream_t stream);

/// Where a run of tokens begins: at `first`, or, for steps that are replayed, at what `on_device` has for each run of `each`
/// tokens.
struct run_position {
  std::int64_t first = 0;
  const std::int32_t* on_device = nullptr;
  std::int32_t each = 1;
};

/// The earliest number of a pass that nothing can be computed with: the first token's, of its first layer. Kernels note it in
/// one word on the device, which is `none` before.
struct unusable_number {
  enum tensor : std::uint32_t { query, key, value, logit };
  std::uint32_t position, layer;
  tensor of;
  std::uint32_t place;  // a head, or a token id

  static constexpr unsigned long long none = ~0ull;
  TESSERA_HD unsigned long long noted() const {
    return (unsigned long long)(position) << 40 | (unsigned long long)(layer) << 28 | of << 26 | place;
  }
  static unusable_number from(unsigned long long noted) {
    return {std::uint32_t(noted >> 40), std::uint32_t(noted >> 28 & 0xfff), tensor(noted >> 26 & 3),
            std::uint32_t(noted & 0x3ffffff)};
  }
};

/// What a layer's queries, keys and values may be at most: products of larger ones overflow float.
inline constexpr float largest_factor = 1e18f;

/// Adds biases to fused projections, and normalises the heads of queries and keys, in place; null: none of it. See the CPU's
/// add_bias and norm_heads; sums of squares are fp32 here.
/// Shapes: bias [q_size + 2 * kv_size]; q_norm, k_norm [head_dim]; qkv as below.
void finish_projections(const llama_config& config, const float* bias, const float* q_norm, const float* k_norm,
                        float* qkv, std::int32_t tokens, cudaStream_t stream);

/// Cuts fused projections into queries, keys and values of `type`, and rotates queries and keys; see the CPU's
/// split_and_rotate. Angles are fp32 products of position and speed, as there. What is no number or above `largest_factor` once
/// it is rounded is noted in `unusable`.
/// Shapes: qkv [tokens, q_size + 2 * kv_size]; q [tokens, q_size]; k, v [tokens, kv_size]; speeds [head_dim / 2].
void split_and_rotate(const llama_config& config, const float* speeds, const float* qkv, std::int32_t tokens,
                      run_position position, element type, void* q, void* k, void* v, std::int32_t layer,
                      unsigned long long* unusable, cudaStream_t stream);

/// y = x, rounded.
void round_to_bf16(const float* x, std::int64_t count, bf16* y, cudaStream_t stream);

/// The token with the highest logit of each row, the lowest id among equals. A logit that is not finite is noted in `unusable`.
/// Shapes: logits [rows, vocab], best [rows].
void best_tokens(const float* logits, std::int32_t rows, std::int32_t vocab, token_t* best,
                 unsigned long long* unusable, cudaStream_t stream);

/// Fills with values from [-spread, spread), the same for the same seed.
void fill_random(void* values, element type, std::int64_t count, float spread, std::uint64_t seed, cudaStream_t stream);

}  // namespace engine::cuda
