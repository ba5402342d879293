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

/// The sizes and weights of a tiny Llama: rows of queries and keys in the order of interleaved RoPE.
inline void put_model(gguf_bytes& file, const tensors& weights) {
  file.text("general.architecture", "llama");
  for (const auto& [key, value] : {std::pair{"embedding_length", 96},
                                   {"feed_forward_length", 80},
                                   {"block_count", 3},
                                   {"attention.head_count", 4},
                                   {"attention.head_count_kv", 2},
                                   {"attention.key_length", 64},
                                   {"context_length", 200},
                                   {"rope.dimension_count", 64}})
    file.count(std::string("llama.") + key, std::uint32_t(value));
  file.number("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  file.number("llama.rope.freq_base", 1000);
  const std::map<std::string, std::string> names{
      {"input_layernorm.weight", "attn_norm"}, {"post_attention_layernorm.weight", "ffn_norm"},
      {"self_attn.q_proj.weight", "attn_q"},   {"self_attn.k_proj.weight", "attn_k"},
      {"self_attn.v_proj.weight", "attn_v"},   {"self_attn.o_proj.weight", "attn_output"},
      {"mlp.gate_proj.weight", "ffn_gate"},    {"mlp.up_proj.weight", "ffn_up"},
      {"mlp.down_proj.weight", "ffn_down"}};
  for (const auto& [name, item] : weights) {
    std::string own = name == "model.embed_tokens.weight" ? "token_embd.weight" : "output_norm.weight";
    if (name == "lm_head.weight") own = "output.weight";
    if (name.starts_with("model.layers."))
      own = "blk." + name.substr(13, 1) + "." + names.at(name.substr(15)) + ".weight";
    std::vector<float> values = item.values;
    if (name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos) {
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
  put_model(file, weights);
  put_tokenizer(file, {}, "gpt-2", marks);
  file.text("tokenizer.chat_template", program);
  return file.bytes();
}

}  // namespace engine_tests
