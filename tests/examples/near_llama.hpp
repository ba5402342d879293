// Tiny models of the architectures near Llama, whose logits transformers has computed.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "engine/files/input_file.hpp"
#include "examples/naive_model.hpp"

namespace engine_tests {

/// What tests/fixtures/architectures/make_logits.py wrote: configs, tokens and logits of tiny models near Llama.
inline const nlohmann::json& architectures() {
  static const nlohmann::json read = nlohmann::json::parse(
      engine::read_text_file(std::string(TESSERA_SOURCE_DIR) + "/tests/fixtures/architectures/logits.json"));
  return read;
}

/// As make_logits.py has it.
inline std::vector<float> hashed_numbers(std::size_t count, std::uint32_t seed) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t hashed = std::uint32_t(i) * 2654435761u + seed * 40503u + 12345u;
    hashed ^= hashed >> 15;
    hashed *= 2246822519u;
    hashed ^= hashed >> 13;
    values[i] = float(double(hashed) / 2147483648.0 - 1);
  }
  return values;
}

/// The weights of one of these models.
inline tensors weights_of(const llama_config& config) {
  tensors all;
  const std::int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  all["model.embed_tokens.weight"].shape = {config.vocab_size, hidden};
  if (!config.tie_word_embeddings) all["lm_head.weight"].shape = {config.vocab_size, hidden};
  all["model.norm.weight"].shape = {hidden};
  for (int layer = 0; layer < config.num_hidden_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".", attention = prefix + "self_attn.";
    all[prefix + "input_layernorm.weight"].shape = all[prefix + "post_attention_layernorm.weight"].shape = {hidden};
    all[attention + "q_proj.weight"].shape = {config.q_size(), hidden};
    all[attention + "k_proj.weight"].shape = all[attention + "v_proj.weight"].shape = {config.kv_size(), hidden};
    all[attention + "o_proj.weight"].shape = {hidden, config.q_size()};
    if (config.qkv_bias) {
      all[attention + "q_proj.bias"].shape = {config.q_size()};
      all[attention + "k_proj.bias"].shape = all[attention + "v_proj.bias"].shape = {config.kv_size()};
    }
    if (config.qk_norm)
      all[attention + "q_norm.weight"].shape = all[attention + "k_norm.weight"].shape = {config.head_dim};
    all[prefix + "mlp.gate_proj.weight"].shape = all[prefix + "mlp.up_proj.weight"].shape = {inner, hidden};
    all[prefix + "mlp.down_proj.weight"].shape = {hidden, inner};
  }
  std::uint32_t seed = 0;
  for (auto& [name, item] : all) {
    item.values = hashed_numbers(std::size_t(std::accumulate(item.shape.begin(), item.shape.end(), std::int64_t(1),
                                                             std::multiplies<std::int64_t>())),
                                 seed++);
    const bool is_norm = name.ends_with("norm.weight"),
               is_wide = name.find("embed") != name.npos || name.ends_with("bias");
    for (float& value : item.values) value = is_norm ? 1 + value / 4 : value * (is_wide ? 0.5f : 0.2f);
  }
  return all;
}

}  // namespace engine_tests
