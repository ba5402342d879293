// FastKVzip's gate on a CUDA device.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/config.hpp"
#include "engine/cuda/ops.hpp"
#include "gate.hpp"

namespace engine::cuda {

/// A layer's gate on the device; its projections in bf16, as the model's weights are.
struct device_gate {
  weight_matrix projections;
  device_array<float> q_bias, q_norm, k_norm, k_base, b;

  explicit device_gate(const gate_layer& gate);
  std::size_t bytes() const {
    return projections.values.bytes() + q_bias.bytes() + q_norm.bytes() + k_norm.bytes() + k_base.bytes() + b.bytes();
  }
};

/// Scores from the products of rows and `gate.projections`. Runs of `each` rows belong together.
/// Shapes   projected [rows, (q_heads + kv_heads) * gate_width]; scores [rows / each, kv_heads, each].
void gate_scores(const llama_config& config, const device_gate& gate, const float* projected, std::int32_t rows,
                 std::int32_t each, float* scores, cudaStream_t stream);

}  // namespace engine::cuda
