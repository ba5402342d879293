// The model's shape, from a Hugging Face config.json, or a GGUF file, of the Llama architecture or one near it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

using token_t = std::int32_t;  ///< a token's id, in [0, vocab_size)

/// Llama 3's stretching of the slow rotations (rope_type "llama3").
struct llama3_rope {
  double factor;                  ///< >= 1
  double low_freq_factor;         ///< > 0
  double high_freq_factor;        ///< > low_freq_factor
  std::int32_t original_context;  ///< original_max_position_embeddings
};

/// What the engine needs to know of a model. Names follow config.json.
struct llama_config {
  std::int32_t hidden_size;
  std::int32_t intermediate_size;
  std::int32_t num_hidden_layers;
  std::int32_t num_attention_heads;
  std::int32_t num_key_value_heads;  ///< divides num_attention_heads
  std::int32_t head_dim;             ///< 64, 80, 96, 128, 192 or 256; may differ from hidden_size / heads
  std::int32_t vocab_size;
  std::int32_t max_position_embeddings;
  float rms_norm_eps;
  double rope_theta;
  std::optional<llama3_rope> rope_scaling;
  bool tie_word_embeddings;
  std::optional<token_t> bos;
  std::vector<token_t> eos;  ///< any of them ends an answer; may be empty
  bool qkv_bias = false;     ///< queries, keys and values have biases (Qwen 2)
  bool qk_norm = false;      ///< RMS norms of queries and keys by head, before RoPE (Qwen 3)
  std::vector<std::uint8_t>
      rotates{};                      ///< by layer, whether RoPE turns queries and keys (SmolLM 3); empty: every layer
  std::vector<float> rope_factors{};  ///< what each frequency of RoPE is divided by [head_dim / 2]; empty: nothing

  std::int32_t q_size() const { return num_attention_heads * head_dim; }
  std::int32_t kv_size() const { return num_key_value_heads * head_dim; }
  bool turns(std::int32_t layer) const { return rotates.empty() || rotates[std::size_t(layer)] != 0; }
};

/// Reads the text of a config.json of model_type llama, qwen2, qwen3 or smollm3. Where a key is absent, the default is that of
/// transformers' config of that model; the sizes have none and must be there, as must num_key_value_heads but for llama.
/// Errors: no JSON object; a value of the wrong type or out of range; heads that do not divide; and everything that
/// this engine does not compute: another model_type or hidden_act, other biases, sliding windows, quantised weights, other
/// RoPE scalings.
llama_config parse_config(std::string_view text);

/// Reads a file. Errors: not readable, or anything that `parse_config` rejects; the message carries the path.
llama_config load_config(const std::filesystem::path& path);

/// The config of a model: of a folder its config.json, of a GGUF file its own metadata.
/// Errors: as `load_config`; of a GGUF file another architecture than these, and RoPE that is stretched but by Llama 3's
/// factors.
llama_config config_of_model(const std::filesystem::path& model);

}  // namespace engine
