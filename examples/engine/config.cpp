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

bool read_flag(const json& object, const char* key, bool fallback = false) {
  const json& value = value_of(object, key);
  if (value.is_null()) return fallback;
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
void read_rope(const json& object, double transformers_base, llama_config& config) {
  constexpr double smallest_base = 1.0, largest_base = 1e12;
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

/// What transformers' config of a model_type has where config.json says nothing.
struct model_kind {
  std::string_view name;
  std::int32_t context;
  double rope_theta;
  bool ties;
  std::optional<std::int32_t> head_dim;  // none: hidden_size / num_attention_heads
};
constexpr model_kind kinds[] = {{"llama", 2048, 1e4, false, std::nullopt},
                                {"qwen2", 32768, 1e4, false, std::nullopt},
                                {"qwen3", 32768, 1e4, false, 128},
                                {"smollm3", 32768, 2e6, true, std::nullopt}};

const model_kind& kind_of(const json& object) {
  const json& type = value_of(object, "model_type");
  if (type.is_null()) return kinds[0];
  for (const model_kind& kind : kinds)
    if (type.is_string() && type.get_ref<const std::string&>() == kind.name) return kind;
  fail("model_type", shown(type), "llama, qwen2, qwen3 or smollm3", "use a checkpoint of one of them");
}

void require_supported(const json& object, const model_kind& kind) {
  require_text(object, "hidden_act", "silu");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    const bool unread = kind.name == "qwen2";  // its biases are fixed, and transformers does not look
    tessera::require(unread || !read_flag(object, key), key, "true", "false", cure_model);
  }
  tessera::require(!read_flag(object, "use_sliding_window"), "use_sliding_window", "true", "false", cure_model);
  const json& layers = value_of(object, "layer_types");
  tessera::require(layers.is_null() || layers.is_array(), "layer_types", shown(layers), "a list", cure_config);
  for (const json& layer : layers)
    tessera::require(layer == "full_attention", "layer_types", shown(layer), "full_attention for each layer",
                     cure_model);
  const json& quantised = value_of(object, "quantization_config");
  tessera::require(quantised.is_null(), "quantization_config", shown(quantised), "null",
                   "use a checkpoint in F32, F16 or BF16");
}

// SmolLM 3: every fourth layer has no RoPE, or those that a list marks with 0.
void read_unrotated_layers(const json& object, llama_config& config) {
  const std::int32_t interval = read_count(object, "no_rope_layer_interval", most_layers, 4);
  const json& given = value_of(object, "no_rope_layers");
  if (given.is_null()) {
    for (std::int32_t layer = 1; layer <= config.num_hidden_layers; ++layer)
      config.rotates.push_back(layer % interval != 0);
    return;
  }
  tessera::require(given.is_array() && given.size() == std::size_t(config.num_hidden_layers), "no_rope_layers",
                   given.is_array() ? std::to_string(given.size()) + " items" : shown(given),
                   "a list with one item for each layer", cure_config);
  for (const json& layer : given) {
    tessera::require(layer == 0 || layer == 1, "no_rope_layers", shown(layer), "0 or 1 for each layer", cure_config);
    config.rotates.push_back(layer == 1);
  }
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
  const model_kind& kind = kind_of(object);
  require_supported(object, kind);

  llama_config config{};
  config.hidden_size = read_count(object, "hidden_size", largest_width);
  config.intermediate_size = read_count(object, "intermediate_size", largest_width);
  config.num_hidden_layers = read_count(object, "num_hidden_layers", most_layers);
  config.num_attention_heads = read_count(object, "num_attention_heads", most_heads);
  config.num_key_value_heads =
      read_count(object, "num_key_value_heads", most_heads,
                 kind.name == "llama" ? std::optional(config.num_attention_heads) : std::nullopt);
  config.vocab_size = read_count(object, "vocab_size", largest_vocabulary);
  config.max_position_embeddings = read_count(object, "max_position_embeddings", largest_context, kind.context);
  config.rms_norm_eps = float(read_number(object, "rms_norm_eps", 0.0, 1.0, 1e-6));
  config.tie_word_embeddings = read_flag(object, "tie_word_embeddings", kind.ties);
  config.qkv_bias = kind.name == "qwen2";
  config.qk_norm = kind.name == "qwen3";
  if (kind.name == "smollm3") read_unrotated_layers(object, config);
  read_rope(object, kind.rope_theta, config);
  read_tokens(object, config);

  tessera::require(config.num_attention_heads % config.num_key_value_heads == 0, "num_key_value_heads",
                   config.num_key_value_heads, "a divisor of num_attention_heads", cure_config);
  const bool derived = value_of(object, "head_dim").is_null() && !kind.head_dim;
  tessera::require(!derived || config.hidden_size % config.num_attention_heads == 0, "hidden_size", config.hidden_size,
                   "a multiple of num_attention_heads where head_dim is absent", cure_config);
  config.head_dim =
      read_count(object, "head_dim", 256, kind.head_dim.value_or(config.hidden_size / config.num_attention_heads));
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
bool is_computed(std::string_view name, std::string_view architecture) {
  constexpr std::string_view whole[] = {"token_embd.weight", "output_norm.weight", "output.weight"};
  constexpr std::string_view parts[] = {"attn_norm.weight", "attn_q.weight",      "attn_k.weight",
                                        "attn_v.weight",    "attn_output.weight", "ffn_norm.weight",
                                        "ffn_gate.weight",  "ffn_up.weight",      "ffn_down.weight"};
  constexpr std::string_view biases[] = {"attn_q.bias", "attn_k.bias", "attn_v.bias"};
  constexpr std::string_view norms[] = {"attn_q_norm.weight", "attn_k_norm.weight"};
  const auto in = [](const auto& list, std::string_view item) {
    return std::find(std::begin(list), std::end(list), item) != std::end(list);
  };
  if (in(whole, name)) return true;
  if (architecture == "llama" && name == "rope_freqs.weight") return true;
  const std::size_t dot = name.starts_with("blk.") ? name.find('.', 4) : std::string_view::npos;
  if (dot == std::string_view::npos) return false;
  const std::string_view part = name.substr(dot + 1);
  return in(parts, part) || (architecture == "qwen2" && in(biases, part)) ||
         (architecture == "qwen3" && in(norms, part));
}

// What a GGUF file says of a model, in the words of config.json.
std::string config_text(const gguf_file& file) {
  const std::string& architecture = file.text("general.architecture");
  const bool is_known = std::any_of(std::begin(kinds), std::end(kinds),
                                    [&](const model_kind& kind) { return kind.name == architecture; });
  tessera::require(is_known, "architecture of the file", printable(architecture), "llama, qwen2, qwen3 or smollm3",
                   "use a model of one of them");
  const std::string place = architecture + ".";
  // Whoever reads such a file stretches RoPE linearly where only a factor is given.
  const gguf_value* scaling = file.value(place + "rope.scaling.type");
  const bool is_plain =
      scaling && std::holds_alternative<std::string>(*scaling) && std::get<std::string>(*scaling) == "none";
  for (const char* key : {"rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"})
    tessera::require(is_plain || !file.value(place + key), place + key, "given", "none", cure_model);
  for (const char* key : {"attention.sliding_window", "expert_count"}) {
    const bool is_unused = !file.value(place + key) || file.count(place + key) == 0;
    tessera::require(is_unused, place + key, "given", "none or 0", cure_model);
  }
  for (const auto& [name, tensor] : file.tensors()) {
    tessera::require(is_computed(name, architecture), "tensor \"" + printable(name) + "\"", "given",
                     "none but those of the architecture " + architecture + " without other biases, norms or experts",
                     cure_model);
  }
  json object;
  object["model_type"] = architecture;
  object["hidden_act"] = "silu";
  object["hidden_size"] = file.count(place + "embedding_length");
  object["intermediate_size"] = file.count(place + "feed_forward_length");
  object["num_hidden_layers"] = file.count(place + "block_count");
  const std::int64_t heads = file.count(place + "attention.head_count");
  object["num_attention_heads"] = heads;
  const bool shares = file.value(place + "attention.head_count_kv") != nullptr;
  object["num_key_value_heads"] = shares ? file.count(place + "attention.head_count_kv") : heads;
  if (file.value(place + "attention.key_length"))
    object["head_dim"] = file.count(place + "attention.key_length");
  else if (heads > 0 && file.count(place + "embedding_length") % heads == 0)
    object["head_dim"] = file.count(place + "embedding_length") / heads;
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
    const std::string key = file.text("general.architecture") + ".rope.dimension_count";
    tessera::require(!file.value(key) || file.count(key) == config.head_dim, "\"" + key + "\"",
                     file.value(key) ? file.count(key) : 0, "the head dim, which is " + std::to_string(config.head_dim),
                     cure_model);
    if (file.find("rope_freqs.weight")) {
      config.rope_factors = file.to_fp32("rope_freqs.weight");
      const bool fit = config.rope_factors.size() == std::size_t(config.head_dim / 2);
      for (const float factor : config.rope_factors)
        tessera::require(fit && factor >= 1e-6f && factor <= 1e6f, "tensor \"rope_freqs.weight\"",
                         fit ? std::to_string(factor) : std::to_string(config.rope_factors.size()) + " numbers",
                         std::to_string(config.head_dim / 2) + " numbers in [1e-6, 1e6]", cure_model);
    }
    return config;
  } catch (const tessera::error& problem) {
    throw tessera::error("file " + printable(model.native()) + ": " + problem.what());
  }
}

}  // namespace engine
