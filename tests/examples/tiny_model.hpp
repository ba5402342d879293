// A model folder for tests of the tool: random weights of a tiny Llama and of its gate, and the shipped tokenizer.
#pragma once

#include <filesystem>
#include <random>
#include <string>
#include <tessera/core/types.hpp>
#include <vector>

#include "engine/files/safetensors.hpp"
#include "temporary_folder.hpp"

namespace tool_tests {

inline std::filesystem::path shipped(const std::string& name) {
  return std::filesystem::path(TESSERA_SOURCE_DIR) / "examples" / name;
}

/// Two layers, four query heads over two KV heads of 64, a context of 1,024 tokens. Of the tensor `large` the rows of head `head`
/// and behind it are so large that products overflow.
class tiny_model {
 public:
  explicit tiny_model(std::string large = "", int head = 0) : large_(std::move(large)), head_(head) {
    folder_.write("config.json",
                  R"({"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,"num_attention_heads":4,)"
                  R"("num_key_value_heads":2,"head_dim":64,"vocab_size":2048,"max_position_embeddings":1024,)"
                  R"("rms_norm_eps":1e-5,"rope_theta":10000,"tie_word_embeddings":true,)"
                  R"("bos_token_id":1,"eos_token_id":2})");
    std::filesystem::copy_file(shipped("model/tokenizer.model"), folder_ / "tokenizer.model");
    add("model.embed_tokens.weight", {2048, 32}, 0.5f);
    add("model.norm.weight", {32}, 1);
    for (const std::string layer : {"0", "1"}) {
      const std::string prefix = "model.layers." + layer + ".";
      add(prefix + "input_layernorm.weight", {32}, 1);
      add(prefix + "post_attention_layernorm.weight", {32}, 1);
      add(prefix + "self_attn.q_proj.weight", {256, 32}, 0.3f);
      add(prefix + "self_attn.k_proj.weight", {128, 32}, 0.3f);
      add(prefix + "self_attn.v_proj.weight", {128, 32}, 0.3f);
      add(prefix + "self_attn.o_proj.weight", {32, 256}, 0.1f);
      add(prefix + "mlp.gate_proj.weight", {48, 32}, 0.2f);
      add(prefix + "mlp.up_proj.weight", {48, 32}, 0.2f);
      add(prefix + "mlp.down_proj.weight", {32, 48}, 0.2f);
    }
    weights_.write(folder_ / "model.safetensors");
    write_gate();
  }

  const std::filesystem::path& path() const { return folder_.path(); }

 private:
  void add(const std::string& name, std::vector<std::int64_t> shape, float spread) {
    std::size_t count = 1;
    for (const auto size : shape) count *= std::size_t(size);
    std::vector<float> values(count);
    std::normal_distribution<float> normal;
    for (float& value : values) value = spread * normal(random_);
    if (name == large_) {
      for (std::size_t i = std::size_t(head_) * 64 * 32; i < count; ++i) values[i] *= 1e20f;
    }
    weights_.add(name, std::move(shape), std::span<const float>(values));
  }

  void write_gate() {
    std::mt19937 random(4);
    engine::safetensors_writer gate;
    const auto give = [&](const std::string& name, std::vector<std::int64_t> shape, float mean) {
      std::size_t count = 1;
      for (const auto size : shape) count *= std::size_t(size);
      std::vector<float> values(count);
      std::normal_distribution<float> normal(mean);
      for (float& value : values) value = normal(random);
      gate.add(name, std::move(shape), std::span<const float>(values));
    };
    for (const std::string layer : {"0", "1"}) {
      const std::string prefix = "layers." + layer + ".";
      give(prefix + "q_proj.weight", {64, 32}, 0);
      give(prefix + "q_proj.bias", {64}, 0);
      give(prefix + "k_proj.weight", {32, 32}, 0);
      give(prefix + "q_norm.weight", {16}, 1);
      give(prefix + "k_norm.weight", {16}, 1);
      give(prefix + "k_base", {2, 1, 16, 16}, 0);
      give(prefix + "b", {2, 2}, 2);
    }
    std::filesystem::create_directory(folder_ / "gate");
    gate.write(folder_ / "gate/gate.safetensors");
  }

  const std::string large_;
  const int head_;
  engine_tests::temporary_folder folder_;
  engine::safetensors_writer weights_;
  std::mt19937 random_{3};
};

}  // namespace tool_tests
