// Tiny models as llama.cpp's converter writes them into GGUF files.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "examples/naive_model.hpp"
#include "gguf_bytes.hpp"

namespace engine_tests {

/// The sizes and weights of a tiny model. Of Llama and SmolLM 3, rows of queries and keys are in the order of interleaved RoPE.
inline void put_model(gguf_bytes& file, const tensors& weights, const llama_config& config,
                      const std::string& architecture = "llama") {
  file.text("general.architecture", architecture);
  for (const auto& [key, value] : {std::pair{"embedding_length", config.hidden_size},
                                   {"feed_forward_length", config.intermediate_size},
                                   {"block_count", config.num_hidden_layers},
                                   {"attention.head_count", config.num_attention_heads},
                                   {"attention.head_count_kv", config.num_key_value_heads},
                                   {"attention.key_length", config.head_dim},
                                   {"context_length", config.max_position_embeddings},
                                   {"rope.dimension_count", config.head_dim}})
    file.count(architecture + "." + key, std::uint32_t(value));
  file.number(architecture + ".attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  file.number(architecture + ".rope.freq_base", float(config.rope_theta));
  const std::map<std::string, std::string> names{
      {"input_layernorm", "attn_norm"},    {"post_attention_layernorm", "ffn_norm"},
      {"self_attn.q_proj", "attn_q"},      {"self_attn.k_proj", "attn_k"},
      {"self_attn.v_proj", "attn_v"},      {"self_attn.o_proj", "attn_output"},
      {"self_attn.q_norm", "attn_q_norm"}, {"self_attn.k_norm", "attn_k_norm"},
      {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
      {"mlp.down_proj", "ffn_down"}};
  const bool is_interleaved = architecture == "llama" || architecture == "smollm3";
  for (const auto& [name, item] : weights) {
    std::string own = name == "model.embed_tokens.weight" ? "token_embd.weight" : "output_norm.weight";
    if (name == "lm_head.weight") own = "output.weight";
    if (name.starts_with("model.layers.")) {
      const std::size_t kind = name.rfind('.');
      own = "blk." + name.substr(13, 1) + "." + names.at(name.substr(15, kind - 15)) + name.substr(kind);
    }
    std::vector<float> values = item.values;
    if (is_interleaved && (name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos)) {
      const std::int64_t width = item.shape[1];
      for (std::int64_t row = 0; row < item.shape[0]; ++row) {
        const std::int64_t head = row / 64, element = row % 64 / 2, half = row % 2;
        std::copy_n(item.values.begin() + (head * 64 + half * 32 + element) * width, width,
                    values.begin() + row * width);
      }
    }
    file.tensor(own, item.shape, values);
  }
}

/// A model of single bytes and the control tokens `marks`, which chats as `program` says and writes ASCII.
inline std::string chat_model_bytes(const std::vector<std::string>& marks, const std::string& program) {
  gguf_bytes file;
  tensors weights = random_weights(true, std::int64_t(256 + marks.size()));
  std::vector<float>& rows = weights["model.embed_tokens.weight"].values;
  std::fill(rows.begin() + 128 * 96, rows.begin() + 256 * 96, 0.0f);
  put_model(file, weights, engine::parse_config(config_text(true)));
  put_tokenizer(file, {}, "gpt-2", marks);
  file.text("tokenizer.chat_template", program);
  return file.bytes();
}

}  // namespace engine_tests
