// The model's shape, from a Hugging Face config.json of the Llama architecture.
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

  std::int32_t q_size() const { return num_attention_heads * head_dim; }
  std::int32_t kv_size() const { return num_key_value_heads * head_dim; }
};

/// Reads the text of a config.json. Where a key is absent, the default is that of transformers' LlamaConfig; the
/// sizes have none and must be there.
/// Errors: no JSON object; a value of the wrong type or out of range; heads that do not divide; and everything that
/// this engine does not compute: another model_type or hidden_act, biases, quantised weights, other RoPE scalings.
llama_config parse_config(std::string_view text);

/// Reads a file. Errors: not readable, or anything that `parse_config` rejects; the message carries the path.
llama_config load_config(const std::filesystem::path& path);

/// The config of a model: of a folder its config.json, of a GGUF file its own metadata.
/// Errors: as `load_config`; of a GGUF file another architecture than llama, and RoPE that is stretched.
llama_config config_of_model(const std::filesystem::path& model);

}  // namespace engine
