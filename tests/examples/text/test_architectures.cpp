// Models near Llama: logits against transformers', from folders and from GGUF files.
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "engine/model.hpp"
#include "engine/ops.hpp"
#include "examples/near_llama.hpp"
#include "gguf_model.hpp"

using namespace engine_tests;
using nlohmann::json;

namespace {

// The logits of the last tokens: the first of them after a prompt in two chunks, the others after a step each.
std::vector<std::vector<float>> last_logits(llama& model) {
  const auto tokens = architectures()["tokens"].get<std::vector<token_t>>();
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
  for (const auto& [name, made] : architectures()["models"].items()) {
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
    json config = architectures()["models"][name]["config"];
    config[key] = value;
    folder.write("config.json", config.dump());
    write_weights(weights_of(engine::load_config(folder / "config.json")), folder / "model.safetensors");
    llama model = llama::load(folder.path(), workers);
    const auto expected = architectures()["models"][name]["logits"][4].get<std::vector<double>>();
    CHECK(relative_error(last_logits(model)[4], expected) > 1e-3);
  }
}

TEST_CASE("what sets the architectures apart is needed, and more than that is refused") {
  executor workers(1);
  for (const auto& [name, tensor, sentence] :
       {std::tuple("qwen2", "model.layers.1.self_attn.k_proj.bias", "k_proj.bias\" is missing"),
        std::tuple("qwen3", "model.layers.1.self_attn.q_norm.weight", "q_norm.weight\" is missing")}) {
    const temporary_folder folder;
    folder.write("config.json", architectures()["models"][name]["config"].dump());
    tensors weights = weights_of(engine::load_config(folder / "config.json"));
    CHECK(weights.erase(tensor) == 1);
    write_weights(weights, folder / "model.safetensors");
    CHECK_THROWS_WITH(llama::load(folder.path(), workers), contains(sentence));
  }
  const auto refused = [](const std::string& model, const std::string& key, const json& value,
                          const std::string& sentence) {
    json config = architectures()["models"][model]["config"];
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

  json config = architectures()["models"]["smollm3"]["config"];
  for (const char* key : {"no_rope_layers", "tie_word_embeddings", "rope_parameters"}) config.erase(key);
  const llama_config defaults = engine::parse_config(config.dump());
  CHECK(defaults.rotates == std::vector<std::uint8_t>{1, 1, 1, 0});
  CHECK(defaults.tie_word_embeddings);
  CHECK(defaults.rope_theta == 2e6);
  config["no_rope_layers"] = json{0, 1, 1, 1};
  CHECK(engine::parse_config(config.dump()).rotates == std::vector<std::uint8_t>{0, 1, 1, 1});
  config = architectures()["models"]["qwen3"]["config"];
  config.erase("head_dim");
  CHECK(engine::parse_config(config.dump()).head_dim == 128);
}
