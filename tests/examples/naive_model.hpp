// A tiny checkpoint with random weights, and a naive Llama in double that reads the same weights.
#pragma once
#include <cmath>
#include <complex>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "engine/model.hpp"
#include "naive_cache.hpp"
#include "temporary_folder.hpp"

namespace engine_tests {

using engine::dtype;
using engine::llama;
using engine::llama_config;
using engine::token_t;
using tessera::cpu::executor;

constexpr token_t vocabulary = 61;

inline std::string config_text(bool tied, const std::string& more = "") {
  return R"({"hidden_size":96,"intermediate_size":80,"num_hidden_layers":3,"num_attention_heads":4,)"
         R"("num_key_value_heads":2,"head_dim":64,"vocab_size":61,"max_position_embeddings":200,)"
         R"("rms_norm_eps":1e-5,"rope_theta":1000,"tie_word_embeddings":)" +
         std::string(tied ? "true" : "false") + more + "}";
}

struct tensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
using tensors = std::map<std::string, tensor>;

// Random weights, rounded to bf16 so that F32 and BF16 files hold the same values.
inline tensors random_weights(bool tied, std::int64_t words = vocabulary) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  tensors all;
  const auto make = [&](const std::string& name, std::vector<std::int64_t> shape, float middle, float spread) {
    std::size_t count = 1;
    for (const auto size : shape) count *= std::size_t(size);
    tensor made{std::move(shape), std::vector<float>(count)};
    for (auto& value : made.values) value = float(tessera::bf16(middle + spread * normal(random)));
    all[name] = std::move(made);
  };
  make("model.embed_tokens.weight", {words, 96}, 0, 0.5f);
  if (!tied) make("lm_head.weight", {words, 96}, 0, 0.2f);
  make("model.norm.weight", {96}, 1, 0.1f);
  for (const std::string layer : {"0", "1", "2"}) {
    const std::string prefix = "model.layers." + layer + ".";
    make(prefix + "input_layernorm.weight", {96}, 1, 0.1f);
    make(prefix + "post_attention_layernorm.weight", {96}, 1, 0.1f);
    make(prefix + "self_attn.q_proj.weight", {256, 96}, 0, 0.15f);
    make(prefix + "self_attn.k_proj.weight", {128, 96}, 0, 0.15f);
    make(prefix + "self_attn.v_proj.weight", {128, 96}, 0, 0.1f);
    make(prefix + "self_attn.o_proj.weight", {96, 256}, 0, 0.06f);
    make(prefix + "mlp.gate_proj.weight", {80, 96}, 0, 0.1f);
    make(prefix + "mlp.up_proj.weight", {80, 96}, 0, 0.1f);
    make(prefix + "mlp.down_proj.weight", {96, 80}, 0, 0.1f);
  }
  return all;
}

inline void write_weights(const tensors& all, const std::filesystem::path& path, dtype type = dtype::f32) {
  engine::safetensors_writer writer;
  for (const auto& [name, item] : all) writer.add_rounded(name, item.shape, item.values, type);
  writer.write(path);
}

inline std::vector<token_t> some_tokens(int count) {
  std::mt19937 random(5);
  std::vector<token_t> tokens(static_cast<std::size_t>(count));
  for (auto& token : tokens) token = token_t(random() % vocabulary);
  return tokens;
}

inline double relative_error(std::span<const float> got, std::span<const double> expected) {
  REQUIRE(got.size() == expected.size());
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(difference / size);
}

inline engine::generate_options at_most(std::int32_t max_new) {
  engine::generate_options options;
  options.max_new = max_new;
  return options;
}

// The oracle: the whole text at once, in double, one token and one head at a time, rotations as complex numbers.
class oracle {
 public:
  using row = std::vector<double>;

  explicit oracle(const tensors& weights, int first_position = 0)
      : weights_(weights), first_position_(first_position) {}

  // The logits after every token.
  std::vector<row> logits(const std::vector<token_t>& tokens) const {
    std::vector<row> states;
    for (const token_t token : tokens) {
      const auto& table = weights_.at("model.embed_tokens.weight").values;
      states.emplace_back(table.begin() + token * 96, table.begin() + (token + 1) * 96);
    }
    for (const std::string layer : {"0", "1", "2"}) pass_layer("model.layers." + layer + ".", states);
    const std::string head = weights_.contains("lm_head.weight") ? "lm_head.weight" : "model.embed_tokens.weight";
    for (auto& state : states) state = product(head, normalised("model.norm.weight", state));
    return states;
  }

 private:
  row product(const std::string& name, const row& in) const {
    const auto& weight = weights_.at(name);
    row out(std::size_t(weight.shape[0]), 0.0);
    for (std::size_t i = 0; i < out.size(); ++i)
      for (std::size_t j = 0; j < in.size(); ++j) out[i] += double(weight.values[i * in.size() + j]) * in[j];
    return out;
  }

  row normalised(const std::string& name, const row& in) const {
    double squares = 0;
    for (const double value : in) squares += value * value;
    const double scale = 1 / std::sqrt(squares / double(in.size()) + 1e-5);
    row out;
    for (std::size_t i = 0; i < in.size(); ++i) out.push_back(in[i] * scale * double(weights_.at(name).values[i]));
    return out;
  }

  void rotate(row& heads, std::size_t token) const {
    for (std::size_t head = 0; head < heads.size() / 64; ++head)
      for (std::size_t i = 0; i < 32; ++i) {
        const double angle = double(first_position_ + int(token)) * std::pow(1000.0, -double(i) / 32);
        double &real = heads[head * 64 + i], &imaginary = heads[head * 64 + i + 32];
        const std::complex<double> turned = std::complex<double>(real, imaginary) * std::polar(1.0, angle);
        real = turned.real();
        imaginary = turned.imag();
      }
  }

  void pass_layer(const std::string& prefix, std::vector<row>& states) const {
    std::vector<row> queries, keys, values;
    for (std::size_t token = 0; token < states.size(); ++token) {
      const row in = normalised(prefix + "input_layernorm.weight", states[token]);
      queries.push_back(product(prefix + "self_attn.q_proj.weight", in));
      keys.push_back(product(prefix + "self_attn.k_proj.weight", in));
      values.push_back(product(prefix + "self_attn.v_proj.weight", in));
      rotate(queries.back(), token);
      rotate(keys.back(), token);
    }
    for (std::size_t token = 0; token < states.size(); ++token) {
      row attended(256, 0.0);
      for (std::size_t head = 0; head < 4; ++head) {
        const std::size_t shared = head / 2 * 64;
        double total = 0;
        for (std::size_t other = 0; other <= token; ++other) {
          double dot = 0;
          for (std::size_t i = 0; i < 64; ++i) dot += queries[token][head * 64 + i] * keys[other][shared + i];
          const double weight = std::exp(dot / 8);
          total += weight;
          for (std::size_t i = 0; i < 64; ++i) attended[head * 64 + i] += weight * values[other][shared + i];
        }
        for (std::size_t i = 0; i < 64; ++i) attended[head * 64 + i] /= total;
      }
      add(states[token], product(prefix + "self_attn.o_proj.weight", attended));
      const row in = normalised(prefix + "post_attention_layernorm.weight", states[token]);
      row gate = product(prefix + "mlp.gate_proj.weight", in);
      const row up = product(prefix + "mlp.up_proj.weight", in);
      for (std::size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
      add(states[token], product(prefix + "mlp.down_proj.weight", gate));
    }
  }

  void add(row& state, const row& change) const {
    for (std::size_t i = 0; i < state.size(); ++i) state[i] += change[i];
  }

  const tensors& weights_;
  int first_position_;
};

// A tiny model on disk and loaded.
struct tiny {
  explicit tiny(bool tied = true, int threads = 2)
      : weights(random_weights(tied)), workers(threads), model(load(tied)) {}

  llama load(bool tied) {
    folder.write("config.json", config_text(tied));
    write_weights(weights, folder / "model.safetensors");
    return llama::load(folder.path(), workers);
  }

  temporary_folder folder;
  tensors weights;
  executor workers;
  llama model;
};

}  // namespace engine_tests
