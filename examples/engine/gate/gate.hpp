// FastKVzip's gate: scores of tokens for methods that take them from the engine. It lies in gate/gate.safetensors, in
// the folder of a model's weights. examples/model/training/train_gate.py makes that file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <tessera/backend/cpu/kernel/executor.hpp>
#include <vector>

#include "engine/config.hpp"
#include "engine/ops.hpp"

namespace engine {

/// Elements of a gate's queries and keys, and learned keys that a token's key competes with.
inline constexpr std::int32_t gate_width = 16, gate_sinks = 16;
inline constexpr float gate_eps = 1e-5f;

/// A layer's gate. Queries and keys are RMS norms of projections of the rows that enter the layer's attention:
///   logit = q k / 4 + b, base_s = q k_base_s / 4, score of a query head = 1 / (1 + sum over s of exp(base_s - logit))
/// The score of a kv_head is the mean over its query heads.
struct gate_layer {
  matrix projections;                 // queries and keys stacked: [(q_heads + kv_heads) * gate_width, hidden]
  std::vector<float> q_bias;          // [q_heads * gate_width]
  std::vector<float> q_norm, k_norm;  // [gate_width]
  std::vector<float> k_base;          // [kv_heads, gate_sinks, gate_width]
  std::vector<float> b;               // [q_heads]
};

/// The gates of a model's layers.
/// Returns  nothing where the model's folder has no gate/gate.safetensors, or where the model is a GGUF file.
/// Errors   a file that is none, or tensors of another model: tessera::error.
std::optional<std::vector<gate_layer>> load_gate(const std::filesystem::path& model, const llama_config& config);

/// Scores of a chunk's or a step's tokens in one layer.
/// Shapes   normed [tokens, hidden], the rows that enter the layer's attention; projected, working memory,
///          [tokens, (q_heads + kv_heads) * gate_width]; scores [kv_heads, tokens].
void gate_scores(tessera::cpu::executor& executor, const llama_config& config, const gate_layer& gate,
                 const float* normed, std::int32_t tokens, float* projected, float* scores);

/// Errors   a cache that takes scores, of a model without a gate: tessera::error.
void require_gate(bool takes_scores, bool has_gate);

}  // namespace engine
