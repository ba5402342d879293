// The layer operations of a Llama model on fp32 rows, split over an executor. All tensors are contiguous, row by row.
// Neither the number of threads nor the place of a buffer in memory changes a bit of a result.
#pragma once

#include <cstdint>
#include <span>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <vector>

#include "config.hpp"

namespace engine {

/// A weight matrix [outputs, inputs], as checkpoints store it.
struct matrix {
  std::int32_t outputs = 0;
  std::int32_t inputs = 0;
  std::vector<float> values;
};

/// y = x W^T. Shapes: x [rows, W.inputs], y [rows, W.outputs].
void linear(tessera::cpu::executor& executor, const float* x, std::int32_t rows, const matrix& weight, float* y);

/// y = x / rms(x) * weight, per row. Shapes: x, y [rows, weight.size()].
void rms_norm(tessera::cpu::executor& executor, const float* x, std::int32_t rows, std::span<const float> weight,
              float eps, float* y);

/// x += y, both [rows, width].
void add(tessera::cpu::executor& executor, const float* y, std::int32_t rows, std::int32_t width, float* x);

/// y = silu(gate) * up. Shapes: gate_up [rows, 2 * width], gate in the first half of a row; y [rows, width].
void swiglu(tessera::cpu::executor& executor, const float* gate_up, std::int32_t rows, std::int32_t width, float* y);

/// x += bias, per row. Shapes: x [rows, bias.size()].
void add_bias(tessera::cpu::executor& executor, std::span<const float> bias, std::int32_t rows, float* x);

/// RMS norms of each head's query and key, in place. Shapes: qkv as in `split_and_rotate`; q_norm, k_norm [head_dim].
void norm_heads(tessera::cpu::executor& executor, const llama_config& config, std::span<const float> q_norm,
                std::span<const float> k_norm, std::int32_t tokens, float* qkv);

/// The rotation speeds of a model, in radians per position: [head_dim / 2], after Llama 3's stretching if there is one, or divided by
/// the model's factors.
std::vector<float> rope_frequencies(const llama_config& config);

/// Cosines and sines of a run of positions.
struct rope_table {
  std::vector<float> cosines, sines;  ///< [tokens, head_dim / 2]
};

/// The table of positions first ... first + tokens - 1. The angle is the fp32 product of position and speed, as in
/// transformers: a double angle would differ from what the checkpoint was trained with by 5e-4 at position 8192.
rope_table make_rope_table(std::span<const float> frequencies, std::int64_t first, std::int32_t tokens);

/// A table that turns nothing, of a layer without RoPE.
rope_table make_still_table(std::size_t frequencies, std::int32_t tokens);

/// Cuts fused projections into queries, keys and values, and rotates queries and keys. Element i of a head turns with
/// element i + head_dim / 2, the pairing of transformers.
/// Shapes: qkv [tokens, q_size + 2 * kv_size]; q [tokens, q_size]; k, v [tokens, kv_size].
void split_and_rotate(tessera::cpu::executor& executor, const llama_config& config, const rope_table& table,
                      const float* qkv, std::int32_t tokens, float* q, float* k, float* v);

}  // namespace engine
