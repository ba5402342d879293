#include "config.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "engine/files/gguf.hpp"
#include "engine/files/input_file.hpp"

namespace engine {
namespace {

using nlohmann::json;
using tessera::fail;

constexpr std::string_view cure_config = "correct config.json";
constexpr std::string_view cure_model = "use a checkpoint without it";

constexpr std::int32_t largest_width = 1 << 20;
constexpr std::int32_t most_layers = 1 << 12;
constexpr std::int32_t most_heads = 1 << 12;
constexpr std::int32_t largest_vocabulary = 1 << 24;
constexpr std::int32_t largest_context = 1 << 24;  // beyond it fp32 no longer tells positions apart

// Only plain values are spelled out: printing a list recurses, and hostile nesting would exhaust the stack.
std::string shown(const json& value) {
  if (value.is_structured()) return value.type_name();
  // Invalid UTF-8 must not turn an error message into another exception.
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 120) text = text.substr(0, 120) + "...";
  return text;
}

// The value of `key`, or null when it is absent or null: config.json writes both for "not set".
const json& value_of(const json& object, const char* key) {
  static const json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

std::int32_t read_count(const json& object, const char* key, std::int32_t largest,
                        std::optional<std::int32_t> fallback = std::nullopt) {
  const json& value = value_of(object, key);
  if (value.is_null() && fallback) return *fallback;
  const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() >= 1 &&
                    value.get<std::uint64_t>() <= std::uint64_t(largest);
  if (!fits) fail(key, shown(value), "an integer in [1, " + std::to_string(largest) + "]", cure_config);
  return value.get<std::int32_t>();
}

// A number with smallest <= value <= largest; `fallback` null means that the key must be there.
double read_number(const json& object, const char* key, double smallest, double largest,
                   std::optional<double> fallback = std::nullopt) {
  const json& value = value_of(object, key);
  if (value.is_null() && fallback) return *fallback;
  const bool fits = value.is_number() && value.get<double>() >= smallest && value.get<double>() <= largest;
  if (!fits) {
    std::ostringstream allowed;
    allowed << "a number in [" << smallest << ", " << largest << "]";
    fail(key, shown(value), allowed.str(), cure_config);
  }
  return value.get<double>();
}

bool read_flag(const json& object, const char* key) {
  const json& value = value_of(object, key);
  if (value.is_null()) return false;
  tessera::require(value.is_boolean(), key, shown(value), "true or false", cure_config);
  return value.get<bool>();
}

void require_text(const json& object, const char* key, std::string_view only) {
  const json& value = value_of(object, key);
  const bool agrees = value.is_null() || (value.is_string() && value.get_ref<const std::string&>() == only);
  tessera::require(agrees, key, shown(value), only, "use a Llama checkpoint");
}

token_t read_token(const json& value, const char* key, std::int32_t vocab_size) {
  const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() < std::uint64_t(vocab_size);
  if (!fits)
    fail(key, shown(value), "a token id in [0, " + std::to_string(vocab_size) + ") or a list of them", cure_config);
  return value.get<token_t>();
}

void read_tokens(const json& object, llama_config& config) {
  // Of several bos ids the first begins a text; transformers allows the list for symmetry with eos.
  const json& bos = value_of(object, "bos_token_id");
  if (bos.is_array() && !bos.empty())
    config.bos = read_token(bos.front(), "bos_token_id", config.vocab_size);
  else if (!bos.is_null())
    config.bos = read_token(bos, "bos_token_id", config.vocab_size);

  const json& eos = value_of(object, "eos_token_id");
  if (eos.is_array())
    for (const auto& item : eos) config.eos.push_back(read_token(item, "eos_token_id", config.vocab_size));
  else if (!eos.is_null())
    config.eos.push_back(read_token(eos, "eos_token_id", config.vocab_size));
}

// Up to version 4 transformers writes rope_theta and rope_scaling; version 5 puts both into rope_parameters.
void read_rope(const json& object, llama_config& config) {
  constexpr double smallest_base = 1.0, largest_base = 1e12, transformers_base = 1e4;
  config.rope_theta = read_number(object, "rope_theta", smallest_base, largest_base, transformers_base);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json& rope = value_of(object, key);
    if (rope.is_null()) continue;
    tessera::require(rope.is_object(), key, shown(rope), "null or a JSON object", cure_config);
    config.rope_theta = read_number(rope, "rope_theta", smallest_base, largest_base, config.rope_theta);
    const double rotated = read_number(rope, "partial_rotary_factor", 0.0, 1.0, 1.0);
    tessera::require(rotated == 1.0, "partial_rotary_factor", rotated, "1", cure_model);

    const json& type = value_of(rope, rope.contains("rope_type") ? "rope_type" : "type");
    if (type.is_null() || type == "default") continue;
    tessera::require(type == "llama3", "rope_type", shown(type), "\"default\" or \"llama3\"", cure_model);
    llama3_rope scaling{};
    scaling.factor = read_number(rope, "factor", 1.0, 1e6);
    scaling.low_freq_factor = read_number(rope, "low_freq_factor", 1e-6, 1e6);
    scaling.high_freq_factor = read_number(rope, "high_freq_factor", 1e-6, 1e6);
    scaling.original_context = read_count(rope, "original_max_position_embeddings", largest_context);
    tessera::require(scaling.low_freq_factor < scaling.high_freq_factor, "low_freq_factor", scaling.low_freq_factor,
                     "less than high_freq_factor", cure_config);
    config.rope_scaling = scaling;
  }
}

void require_supported(const json& object) {
  require_text(object, "model_type", "llama");
  require_text(object, "hidden_act", "silu");
  for (const char* key : {"attention_bias", "mlp_bias"})
    tessera::require(!read_flag(object, key), key, "true", "false", cure_model);
  const json& quantised = value_of(object, "quantization_config");
  tessera::require(quantised.is_null(), "quantization_config", shown(quantised), "null",
                   "use a checkpoint in F32, F16 or BF16");
}

}  // namespace

llama_config parse_config(std::string_view text) {
  json object;
  try {
    object = json::parse(text.begin(), text.end());
  } catch (const json::exception& problem) {
    fail("config.json", problem.what(), "a JSON object", cure_config);
  }
  tessera::require(object.is_object(), "config.json", object.type_name(), "a JSON object", cure_config);
  require_supported(object);

  llama_config config{};
  config.hidden_size = read_count(object, "hidden_size", largest_width);
  config.intermediate_size = read_count(object, "intermediate_size", largest_width);
  config.num_hidden_layers = read_count(object, "num_hidden_layers", most_layers);
  config.num_attention_heads = read_count(object, "num_attention_heads", most_heads);
  config.num_key_value_heads = read_count(object, "num_key_value_heads", most_heads, config.num_attention_heads);
  config.vocab_size = read_count(object, "vocab_size", largest_vocabulary);
  config.max_position_embeddings = read_count(object, "max_position_embeddings", largest_context, 2048);
  config.rms_norm_eps = float(read_number(object, "rms_norm_eps", 0.0, 1.0, 1e-6));
  config.tie_word_embeddings = read_flag(object, "tie_word_embeddings");
  read_rope(object, config);
  read_tokens(object, config);

  tessera::require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads",
                   config.num_key_value_heads, "a divisor of num_attention_heads", cure_config);
  const bool derived = value_of(object, "head_dim").is_null();
  tessera::require(!derived || config.hidden_size % config.num_attention_heads == 0, "hidden_size", config.hidden_size,
                   "a multiple of num_attention_heads where head_dim is absent", cure_config);
  config.head_dim = read_count(object, "head_dim", 256, config.hidden_size / config.num_attention_heads);
  const auto dim = config.head_dim;
  const bool supported = dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 192 || dim == 256;
  tessera::require(supported, derived ? "head_dim (hidden_size / num_attention_heads)" : "head_dim", dim,
                   "64, 80, 96, 128, 192 or 256", "use a checkpoint with such a head_dim");
  return config;
}

llama_config load_config(const std::filesystem::path& path) {
  const std::string text = read_text_file(path);
  try {
    return parse_config(text);
  } catch (const tessera::error& problem) {
    throw tessera::error("file " + printable(path.native()) + ": " + problem.what());
  }
}

namespace {

/// Whether the engine computes with a tensor of that name. One that it passed over would make other numbers.
bool is_of_llama(std::string_view name) {
  constexpr std::string_view whole[] = {"token_embd.weight", "output_norm.weight", "output.weight"};
  constexpr std::string_view parts[] = {"attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_output",
                                        "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};
  if (std::find(std::begin(whole), std::end(whole), name) != std::end(whole)) return true;
  const std::size_t dot = name.starts_with("blk.") ? name.find('.', 4) : std::string_view::npos;
  if (dot == std::string_view::npos || !name.ends_with(".weight")) return false;
  const std::string_view part = name.substr(dot + 1, name.size() - dot - 1 - std::string_view(".weight").size());
  return std::find(std::begin(parts), std::end(parts), part) != std::end(parts);
}

// What a GGUF file says of a model, in the words of config.json.
std::string config_text(const gguf_file& file) {
  const std::string& architecture = file.text("general.architecture");
  tessera::require(architecture == "llama", "architecture of the file", printable(architecture), "llama",
                   "use a model of the Llama architecture");
  const std::string place = architecture + ".";
  // Whoever reads such a file stretches RoPE linearly where only a factor is given.
  const gguf_value* scaling = file.value("llama.rope.scaling.type");
  const bool is_plain =
      scaling && std::holds_alternative<std::string>(*scaling) && std::get<std::string>(*scaling) == "none";
  for (const char* key : {"llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear"})
    tessera::require(is_plain || !file.value(key), key, "given", "none", cure_model);
  for (const auto& [name, tensor] : file.tensors()) {
    tessera::require(is_of_llama(name), "tensor \"" + printable(name) + "\"", "given",
                     "none but those of a Llama model without biases, experts or stretched RoPE", cure_model);
  }
  json object;
  object["model_type"] = "llama";
  object["hidden_act"] = "silu";
  object["hidden_size"] = file.count(place + "embedding_length");
  object["intermediate_size"] = file.count(place + "feed_forward_length");
  object["num_hidden_layers"] = file.count(place + "block_count");
  object["num_attention_heads"] = file.count(place + "attention.head_count");
  if (file.value(place + "attention.head_count_kv"))
    object["num_key_value_heads"] = file.count(place + "attention.head_count_kv");
  if (file.value(place + "attention.key_length")) object["head_dim"] = file.count(place + "attention.key_length");
  object["max_position_embeddings"] = file.count(place + "context_length");
  object["rms_norm_eps"] = file.number(place + "attention.layer_norm_rms_epsilon");
  object["rope_theta"] = file.value(place + "rope.freq_base") ? file.number(place + "rope.freq_base") : 1e4;
  object["tie_word_embeddings"] = file.find("output.weight") == nullptr;
  object["vocab_size"] = file.texts("tokenizer.ggml.tokens").size();
  if (file.value("tokenizer.ggml.bos_token_id")) object["bos_token_id"] = file.count("tokenizer.ggml.bos_token_id");
  if (file.value("tokenizer.ggml.eos_token_id")) object["eos_token_id"] = file.count("tokenizer.ggml.eos_token_id");
  return object.dump();
}

}  // namespace

llama_config config_of_model(const std::filesystem::path& model) {
  if (!is_gguf(model)) return load_config(model / "config.json");
  const gguf_file file = gguf_file::open(model);
  try {
    llama_config config = parse_config(config_text(file));
    const gguf_value* rotated = file.value("llama.rope.dimension_count");
    tessera::require(!rotated || file.count("llama.rope.dimension_count") == config.head_dim,
                     "\"llama.rope.dimension_count\"", rotated ? file.count("llama.rope.dimension_count") : 0,
                     "the head dim, which is " + std::to_string(config.head_dim), cure_model);
    return config;
  } catch (const tessera::error& problem) {
    throw tessera::error("file " + printable(model.native()) + ": " + problem.what());
  }
}

}  // namespace engine
