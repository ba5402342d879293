// A llama of two layers with random weights, as a GGUF file that llama.cpp loads: no model is needed to test the integration.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "examples/text/gguf_bytes.hpp"
#include "model.hpp"

namespace llama_tests {

using namespace tessera_llama;

constexpr int vocabulary_size = 96, heads = 4, kv_heads = 2, dim = 64, layers = 2, hidden = 64, inner = 96;

inline std::string tiny_llama_bytes() {
  engine_tests::gguf_bytes file;
  std::mt19937 bits(11);
  std::normal_distribution<float> normal;
  const auto tensor = [&](const std::string& name, std::vector<std::int64_t> shape, float spread) {
    std::size_t count = 1;
    for (const std::int64_t size : shape) count *= std::size_t(size);
    std::vector<float> values(count);
    for (float& value : values) value = spread == 0 ? 1 : spread * normal(bits);
    file.tensor(name, shape, values);
  };
  file.text("general.architecture", "llama");
  for (const auto& [key, value] : {std::pair{"embedding_length", hidden},
                                   {"feed_forward_length", inner},
                                   {"block_count", layers},
                                   {"attention.head_count", heads},
                                   {"attention.head_count_kv", kv_heads},
                                   {"attention.key_length", dim},
                                   {"attention.value_length", dim},
                                   {"context_length", 4096},
                                   {"rope.dimension_count", dim},
                                   {"vocab_size", vocabulary_size}})
    file.count(std::string("llama.") + key, std::uint32_t(value));
  file.number("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  file.text("tokenizer.ggml.model", "no_vocab");
  tensor("token_embd.weight", {vocabulary_size, hidden}, 1);
  tensor("output_norm.weight", {hidden}, 0);
  tensor("output.weight", {vocabulary_size, hidden}, 0.3f);
  for (int layer = 0; layer < layers; ++layer) {
    const std::string own = "blk." + std::to_string(layer) + ".";
    tensor(own + "attn_norm.weight", {hidden}, 0);
    tensor(own + "ffn_norm.weight", {hidden}, 0);
    tensor(own + "attn_q.weight", {heads * dim, hidden}, 0.25f);
    tensor(own + "attn_k.weight", {kv_heads * dim, hidden}, 0.25f);
    tensor(own + "attn_v.weight", {kv_heads * dim, hidden}, 0.25f);
    tensor(own + "attn_output.weight", {hidden, heads * dim}, 0.1f);
    tensor(own + "ffn_gate.weight", {inner, hidden}, 0.1f);
    tensor(own + "ffn_up.weight", {inner, hidden}, 0.1f);
    tensor(own + "ffn_down.weight", {hidden, inner}, 0.1f);
  }
  return file.bytes();
}

/// The model, loaded once.
inline const loaded_model& tiny_model() {
  static const loaded_model model = [] {
    const auto path =
        std::filesystem::temp_directory_path() / ("tessera_tiny_llama_" + std::to_string(::getpid()) + ".gguf");
    std::ofstream(path, std::ios::binary) << tiny_llama_bytes();
    loaded_model loaded(path.string());
    std::filesystem::remove(path);
    return loaded;
  }();
  return model;
}

inline std::vector<llama_token> random_tokens(std::mt19937& bits, int count) {
  std::vector<llama_token> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(llama_token(bits() % vocabulary_size));
  return tokens;
}

inline std::vector<float> logits_of(llama_context* context, int row = -1) {
  const float* const logits = llama_get_logits_ith(context, row);
  return {logits, logits + vocabulary_size};
}

/// llama.cpp by itself, whose memory has cells of fp32 and no flash attention: the nearest to the definition that it has.
struct plain_llama {
  context_pointer context;
  llama_pos next = 0;
  plain_llama() {
    struct exact {
      void attach(llama_context_params& params) const {
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
        params.type_k = params.type_v = GGML_TYPE_F32;
      }
    } settings;
    context = tiny_model().context(2048, 1, settings);
  }
  void decode(llama_context* of, const llama_batch& batch) {
    tessera::require(llama_decode(of, batch) == 0, "llama_decode", "failed", "0", "see its log");
    next += batch.n_tokens;
  }
  llama_pos next_position(llama_seq_id) const { return next; }
};

inline double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 1e-30;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]), size += double(b[i]) * b[i];
  return std::sqrt(difference / size);
}

}  // namespace llama_tests
