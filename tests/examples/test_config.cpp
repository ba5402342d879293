#include <algorithm>
#include <string>
#include <tessera/core/error.hpp>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "engine/config.hpp"
#include "temporary_folder.hpp"

namespace {

using engine::parse_config;
using fields = std::vector<std::pair<std::string, std::string>>;

// The smallest sensible config with some keys set to other JSON texts, or left out where the text is empty.
std::string config_with(const fields& changes) {
  fields all{{"hidden_size", "304"},       {"intermediate_size", "800"}, {"num_hidden_layers", "6"},
             {"num_attention_heads", "8"}, {"num_key_value_heads", "4"}, {"head_dim", "64"},
             {"vocab_size", "2048"},       {"model_type", "\"llama\""}};
  for (const auto& [key, value] : changes) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& field) { return field.first == key; });
    if (found == all.end())
      all.emplace_back(key, value);
    else
      found->second = value;
  }
  std::string text;
  for (const auto& [key, value] : all)
    if (!value.empty()) text += (text.empty() ? "{\"" : ",\"") + key + "\":" + value;
  return text + "}";
}

void rejects(const fields& changes, const std::string& reason) {
  INFO(config_with(changes));
  CHECK_THROWS_AS(parse_config(config_with(changes)), tessera::error);
  CHECK_THROWS_WITH(parse_config(config_with(changes)), contains(reason));
}

}  // namespace

TEST_CASE("a config is read field by field") {
  const auto config = parse_config(config_with({{"rms_norm_eps", "1e-05"},
                                                {"rope_theta", "1000000"},
                                                {"max_position_embeddings", "16384"},
                                                {"tie_word_embeddings", "true"},
                                                {"hidden_act", "\"silu\""},
                                                {"attention_bias", "false"},
                                                {"rope_scaling", "null"},
                                                {"bos_token_id", "1"},
                                                {"eos_token_id", "[2, 5]"}}));
  CHECK(config.hidden_size == 304);
  CHECK(config.intermediate_size == 800);
  CHECK(config.num_hidden_layers == 6);
  CHECK(config.q_size() == 512);
  CHECK(config.kv_size() == 256);
  CHECK(config.vocab_size == 2048);
  CHECK(config.max_position_embeddings == 16384);
  CHECK(config.rms_norm_eps == 1e-5f);
  CHECK(config.rope_theta == 1e6);
  CHECK(config.tie_word_embeddings);
  CHECK(config.bos == 1);
  CHECK(config.eos == std::vector<engine::token_t>{2, 5});
  CHECK_FALSE(config.rope_scaling);
}

TEST_CASE("absent keys take transformers' defaults") {
  const auto config =
      parse_config(config_with({{"head_dim", ""}, {"hidden_size", "512"}, {"num_key_value_heads", "null"}}));
  CHECK(config.head_dim == 64);
  CHECK(config.num_key_value_heads == 8);
  CHECK(config.max_position_embeddings == 2048);
  CHECK(config.rms_norm_eps == 1e-6f);
  CHECK(config.rope_theta == 1e4);
  CHECK_FALSE(config.tie_word_embeddings);
  CHECK_FALSE(config.bos);
  CHECK(config.eos.empty());
}

TEST_CASE("RoPE is read where transformers 4 and where transformers 5 put it") {
  const std::string scaling = R"("rope_type":"llama3","factor":32.0,"low_freq_factor":1.0,"high_freq_factor":4.0,)"
                              R"("original_max_position_embeddings":8192)";
  const auto old_style = parse_config(config_with({{"rope_theta", "500000.0"}, {"rope_scaling", "{" + scaling + "}"}}));
  const auto new_style = parse_config(config_with({{"rope_parameters", R"({"rope_theta":500000.0,)" + scaling + "}"}}));
  for (const auto& config : {old_style, new_style}) {
    CHECK(config.rope_theta == 500000.0);
    REQUIRE(config.rope_scaling);
    CHECK(config.rope_scaling->factor == 32.0);
    CHECK(config.rope_scaling->low_freq_factor == 1.0);
    CHECK(config.rope_scaling->high_freq_factor == 4.0);
    CHECK(config.rope_scaling->original_context == 8192);
  }
  const auto plain = parse_config(config_with({{"rope_parameters", R"({"rope_theta":1e6,"rope_type":"default"})"}}));
  CHECK(plain.rope_theta == 1e6);
  CHECK_FALSE(plain.rope_scaling);
}

TEST_CASE("values out of range are refused with what is allowed") {
  rejects({{"hidden_size", ""}}, "hidden_size is null; expected an integer in [1, ");
  rejects({{"hidden_size", "0"}}, "hidden_size is 0");
  rejects({{"hidden_size", "-304"}}, "-304");
  rejects({{"hidden_size", "304.5"}}, "304.5");
  rejects({{"hidden_size", "\"304\""}}, "hidden_size");
  rejects({{"vocab_size", "99999999999999999999"}}, "vocab_size");
  rejects({{"num_hidden_layers", "[[6]]"}}, "array");
  rejects({{"num_key_value_heads", "3"}}, "divisor of num_attention_heads");
  rejects({{"head_dim", "72"}}, "64, 80, 96, 128, 192 or 256");
  rejects({{"head_dim", ""}}, "hidden_size / num_attention_heads");
  rejects({{"head_dim", ""}, {"hidden_size", "300"}}, "multiple of num_attention_heads");
  rejects({{"rms_norm_eps", "-1e-5"}}, "rms_norm_eps");
  rejects({{"rope_theta", "0"}}, "rope_theta");
  rejects({{"rope_theta", "1e400"}}, "config.json");
  rejects({{"max_position_embeddings", "16777217"}}, "16777216");
  rejects({{"tie_word_embeddings", "1"}}, "true or false");
  rejects({{"eos_token_id", "2048"}}, "eos_token_id is 2048");
  rejects({{"eos_token_id", "[1,-1]"}}, "eos_token_id is -1");
  rejects({{"bos_token_id", "\"<s>\""}}, "bos_token_id");
}

TEST_CASE("what the engine does not compute is refused by name") {
  rejects({{"model_type", "\"mistral\""}}, "model_type");
  rejects({{"hidden_act", "\"gelu\""}}, "hidden_act");
  rejects({{"attention_bias", "true"}}, "attention_bias");
  rejects({{"mlp_bias", "true"}}, "mlp_bias");
  rejects({{"quantization_config", "{}"}}, "quantization_config");
  rejects({{"rope_scaling", R"({"type":"linear","factor":2.0})"}}, "linear");
  rejects({{"rope_parameters", R"({"rope_type":"yarn"})"}}, "yarn");
  rejects({{"rope_parameters", R"({"partial_rotary_factor":0.5})"}}, "partial_rotary_factor");
  rejects({{"rope_scaling", "2.0"}}, "rope_scaling");
  rejects({{"rope_scaling", R"({"rope_type":"llama3"})"}}, "factor");
  rejects({{"rope_scaling", R"({"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":1,)"
                            R"("original_max_position_embeddings":8192})"}},
          "low_freq_factor");
}

TEST_CASE("text that is no JSON object is refused, however deep it nests") {
  for (const std::string text : {"", "{", "[]", "null", "\xff\xfe", "{\"hidden_size\":304,}"})
    CHECK_THROWS_AS(parse_config(text), tessera::error);
  const std::string deep = std::string(500'000, '[') + std::string(500'000, ']');
  rejects({{"bos_token_id", deep}}, "bos_token_id");
  rejects({{"hidden_act", deep}}, "hidden_act");
}

TEST_CASE("an error in a config file names the file") {
  const engine_tests::temporary_folder folder;
  folder.write("config.json", "{}");
  CHECK_THROWS_WITH(engine::load_config(folder / "config.json"), contains("config.json") && contains("hidden_size"));
  CHECK_THROWS_WITH(engine::load_config(folder / "absent.json"), contains("absent.json"));
  CHECK_THROWS_AS(engine::load_config(folder.path()), tessera::error);
}
