// Models near Llama: logits against transformers', from folders and from GGUF files.
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "engine/model.hpp"
#include "engine/ops.hpp"
#include "gguf_model.hpp"

using namespace engine_tests;
using nlohmann::json;

namespace {

const json& fixture() {
  static const json read = json::parse(
      engine::read_text_file(std::string(TESSERA_SOURCE_DIR) + "/tests/fixtures/architectures/logits.json"));
  return read;
}

// As make_logits.py has it.
std::vector<float> numbers(std::size_t count, std::uint32_t seed) {
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

tensors weights_of(const llama_config& config) {
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
    item.values = numbers(std::size_t(std::accumulate(item.shape.begin(), item.shape.end(), std::int64_t(1),
                                                      std::multiplies<std::int64_t>())),
                          seed++);
    const bool is_norm = name.ends_with("norm.weight"),
               is_wide = name.find("embed") != name.npos || name.ends_with("bias");
    for (float& value : item.values) value = is_norm ? 1 + value / 4 : value * (is_wide ? 0.5f : 0.2f);
  }
  return all;
}

// The logits of the last tokens: the first of them after a prompt in two chunks, the others after a step each.
std::vector<std::vector<float>> last_logits(llama& model) {
  const auto tokens = fixture()["tokens"].get<std::vector<token_t>>();
  const std::span<const token_t> all(tokens), prompt = all.first(all.size() - 4);
  naive_cache cache(model.config());
  engine::prefill_options chunks;
  chunks.chunk = 15;
  std::vector<std::vector<float>> logits{model.prefill(prompt, cache, chunks)};
  for (std::size_t i = prompt.size(); i < all.size(); ++i) logits.push_back(model.decode(all.subspan(i, 1), cache));
  return logits;
}

// The file that llama.cpp's converter would write.
std::string gguf_of(const std::string& name, const llama_config& config, const tensors& weights) {
  gguf_bytes file;
  put_model(file, weights, config, name);
  std::vector<std::string> tokens;
  for (int id = 0; id < config.vocab_size; ++id) tokens.push_back("t" + std::to_string(id));
  file.texts("tokenizer.ggml.tokens", tokens);
  if (config.rope_scaling) {
    llama_config plain = config;
    plain.rope_scaling.reset();
    const std::vector<float> slow = engine::rope_frequencies(config), usual = engine::rope_frequencies(plain);
    std::vector<float> factors;
    for (std::size_t i = 0; i < slow.size(); ++i) factors.push_back(usual[i] / slow[i]);
    file.tensor("rope_freqs.weight", {std::int64_t(factors.size())}, factors);
  }
  return file.bytes();
}

}  // namespace

TEST_CASE("models of each architecture have transformers' logits, from a folder and from a GGUF file") {
  for (const auto& [name, made] : fixture()["models"].items()) {
    const temporary_folder folder;
    folder.write("config.json", made["config"].dump());
    const llama_config config = engine::load_config(folder / "config.json");
    const tensors weights = weights_of(config);
    write_weights(weights, folder / "model.safetensors");
    folder.write("model.gguf", gguf_of(name, config, weights));
    executor workers(1);
    for (const auto& path : {folder.path(), folder / "model.gguf"}) {
      CAPTURE(name, path);
      llama model = llama::load(path, workers);
      CHECK(model.config().tie_word_embeddings == config.tie_word_embeddings);
      const auto logits = last_logits(model);
      REQUIRE(made["logits"].size() == logits.size());
      for (std::size_t i = 0; i < logits.size(); ++i)
        CHECK(relative_error(logits[i], made["logits"][i].get<std::vector<double>>()) < 1e-5);
    }
  }
}

TEST_CASE("layers that RoPE does not turn, and how it is stretched, change the logits") {
  executor workers(1);
  for (const auto& [name, key, value] :
       {std::tuple<std::string, std::string, json>("smollm3", "no_rope_layers", {1, 1, 1, 1}),
        {"llama", "rope_parameters", {{"rope_theta", 1000.0}}}}) {
    const temporary_folder folder;
    json config = fixture()["models"][name]["config"];
    config[key] = value;
    folder.write("config.json", config.dump());
    write_weights(weights_of(engine::load_config(folder / "config.json")), folder / "model.safetensors");
    llama model = llama::load(folder.path(), workers);
    const auto expected = fixture()["models"][name]["logits"][4].get<std::vector<double>>();
    CHECK(relative_error(last_logits(model)[4], expected) > 1e-3);
  }
}

TEST_CASE("what sets the architectures apart is needed, and more than that is refused") {
  executor workers(1);
  for (const auto& [name, tensor, sentence] :
       {std::tuple("qwen2", "model.layers.1.self_attn.k_proj.bias", "k_proj.bias\" is missing"),
        std::tuple("qwen3", "model.layers.1.self_attn.q_norm.weight", "q_norm.weight\" is missing")}) {
    const temporary_folder folder;
    folder.write("config.json", fixture()["models"][name]["config"].dump());
    tensors weights = weights_of(engine::load_config(folder / "config.json"));
    CHECK(weights.erase(tensor) == 1);
    write_weights(weights, folder / "model.safetensors");
    CHECK_THROWS_WITH(llama::load(folder.path(), workers), contains(sentence));
  }
  const auto refused = [](const std::string& model, const std::string& key, const json& value,
                          const std::string& sentence) {
    json config = fixture()["models"][model]["config"];
    config[key] = value;
    CHECK_THROWS_WITH(engine::parse_config(config.dump()), contains(sentence));
  };
  refused("qwen2", "use_sliding_window", true, "use_sliding_window is true; expected false");
  refused("qwen3", "layer_types", json{"full_attention", "sliding_attention"}, "full_attention for each layer");
  refused("qwen3", "attention_bias", true, "attention_bias is true");
  refused("qwen2", "num_key_value_heads", nullptr, "num_key_value_heads is null");
  refused("qwen2", "model_type", "qwen2_moe", "expected llama, qwen2, qwen3 or smollm3");
  refused("smollm3", "no_rope_layers", json{1, 0}, "no_rope_layers is 2 items");
  refused("smollm3", "no_rope_layers", json{1, 0, 2, 0}, "no_rope_layers is 2; expected 0 or 1");
  refused("smollm3", "mlp_bias", true, "mlp_bias is true");
  refused("qwen3", "rope_parameters", json{{"rope_type", "yarn"}, {"factor", 4.0}}, "rope_type is \"yarn\"");

  json config = fixture()["models"]["smollm3"]["config"];
  for (const char* key : {"no_rope_layers", "tie_word_embeddings", "rope_parameters"}) config.erase(key);
  const llama_config defaults = engine::parse_config(config.dump());
  CHECK(defaults.rotates == std::vector<std::uint8_t>{1, 1, 1, 0});
  CHECK(defaults.tie_word_embeddings);
  CHECK(defaults.rope_theta == 2e6);
  config["no_rope_layers"] = json{0, 1, 1, 1};
  CHECK(engine::parse_config(config.dump()).rotates == std::vector<std::uint8_t>{0, 1, 1, 1});
  config = fixture()["models"]["qwen3"]["config"];
  config.erase("head_dim");
  CHECK(engine::parse_config(config.dump()).head_dim == 128);
}
