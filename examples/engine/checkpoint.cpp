#include "checkpoint.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tessera/core/error.hpp>

#include "config.hpp"
#include "engine/files/input_file.hpp"

namespace engine {
namespace {

using nlohmann::json;

// The distinct file names of an index. They come from a downloaded file, so none may lead out of its folder.
std::set<std::string> shard_names(const std::filesystem::path& path) {
  constexpr std::string_view cure = "download the checkpoint again";
  const std::string name = "file " + printable(path.native());
  json index;
  try {
    index = json::parse(read_text_file(path));
  } catch (const json::exception& problem) {
    tessera::fail(name, problem.what(), "a JSON object", cure);
  }
  const bool has_map = index.is_object() && index.contains("weight_map") && index["weight_map"].is_object();
  tessera::require(has_map, name + ": weight_map", "missing", "an object from tensor to file name", cure);
  std::set<std::string> shards;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    const std::string shard = file.is_string() ? file.get<std::string>() : "";
    const bool plain = !shard.empty() && shard.find_first_of("/\\") == std::string::npos;
    tessera::require(plain, name + ": the file of \"" + printable(tensor) + "\"",
                     file.is_string() ? printable(shard) : file.type_name(), "a file name without a folder", cure);
    shards.insert(shard);
  }
  return shards;
}

// What a GGUF file calls a weight; empty: it has none of that name.
std::string gguf_name(std::string_view name) {
  if (name == "model.embed_tokens.weight") return "token_embd.weight";
  if (name == "model.norm.weight") return "output_norm.weight";
  if (name == "lm_head.weight") return "output.weight";
  constexpr std::string_view prefix = "model.layers.";
  const std::size_t dot = name.starts_with(prefix) ? name.find('.', prefix.size()) : std::string_view::npos;
  if (dot == std::string_view::npos) return {};
  static const std::map<std::string, std::string, std::less<>> parts{
      {"input_layernorm.weight", "attn_norm.weight"},    {"post_attention_layernorm.weight", "ffn_norm.weight"},
      {"self_attn.q_proj.weight", "attn_q.weight"},      {"self_attn.k_proj.weight", "attn_k.weight"},
      {"self_attn.v_proj.weight", "attn_v.weight"},      {"self_attn.o_proj.weight", "attn_output.weight"},
      {"mlp.gate_proj.weight", "ffn_gate.weight"},       {"mlp.up_proj.weight", "ffn_up.weight"},
      {"mlp.down_proj.weight", "ffn_down.weight"},       {"self_attn.q_proj.bias", "attn_q.bias"},
      {"self_attn.k_proj.bias", "attn_k.bias"},          {"self_attn.v_proj.bias", "attn_v.bias"},
      {"self_attn.q_norm.weight", "attn_q_norm.weight"}, {"self_attn.k_norm.weight", "attn_k_norm.weight"}};
  const auto part = parts.find(name.substr(dot + 1));
  if (part == parts.end()) return {};
  return "blk." + std::string(name.substr(prefix.size(), dot - prefix.size())) + "." + part->second;
}

}  // namespace

checkpoint checkpoint::open(const std::filesystem::path& directory) {
  checkpoint opened;
  if (is_gguf(directory)) {
    opened.gguf_ = gguf_file::open(directory);
    return opened;
  }
  const auto single = directory / "model.safetensors", index = directory / "model.safetensors.index.json";
  if (there(single)) {
    opened.files_.push_back(safetensors_file::open(single));
    return opened;
  }
  tessera::require(there(index), "folder " + printable(directory.native()), "without weights",
                   "model.safetensors or model.safetensors.index.json in it", "pass the folder of a checkpoint");
  for (const auto& shard : shard_names(index)) {
    safetensors_file file = safetensors_file::open(directory / shard);
    for (const auto& [name, tensor] : file.tensors())
      tessera::require(!opened.contains(name), "tensor \"" + printable(name) + "\"", "in two shards",
                       "one shard a tensor", "download the checkpoint again");
    opened.files_.push_back(std::move(file));
  }
  return opened;
}

const safetensors_file* checkpoint::file_of(std::string_view name) const {
  for (const auto& file : files_)
    if (file.contains(name)) return &file;
  return nullptr;
}

bool checkpoint::contains(std::string_view name) const {
  return gguf_ ? gguf_->find(gguf_name(name)) != nullptr : file_of(name) != nullptr;
}

// Of Llama and SmolLM 3, GGUF's rows of queries and keys stand in the order of interleaved RoPE: element i of a head's first
// half, then that of its second.
std::vector<float> checkpoint::gguf_weight(std::string_view name) const {
  std::vector<float> values = gguf_->to_fp32(gguf_name(name));
  const bool is_query = name.ends_with("q_proj.weight"), is_key = name.ends_with("k_proj.weight");
  const std::string& architecture = gguf_->text("general.architecture");
  if ((!is_query && !is_key) || (architecture != "llama" && architecture != "smollm3")) return values;
  const std::string all = architecture + ".attention.head_count", shared = all + "_kv";
  const std::string& key = is_query || !gguf_->value(shared) ? all : shared;
  const std::vector<std::int64_t> shape = this->shape(name);
  const std::int64_t heads = gguf_->count(key), width = shape.back(), dim = heads > 0 ? shape.front() / heads : 0;
  tessera::require(shape.size() == 2 && dim > 0 && dim % 2 == 0 && heads * dim == shape.front(),
                   "rows of weight \"" + std::string(name) + "\"", shape.front(), "those of whole heads",
                   "use a complete file");
  std::vector<float> ordered(values.size());
  for (std::int64_t row = 0; row < heads * dim; ++row) {
    const std::int64_t head = row / dim, within = row % dim;
    const std::int64_t source = head * dim + within % (dim / 2) * 2 + within / (dim / 2);
    std::copy_n(values.begin() + source * width, width, ordered.begin() + row * width);
  }
  return ordered;
}

std::vector<float> checkpoint::weight(std::string_view name, std::initializer_list<std::int64_t> shape) const {
  const safetensors_file* file = file_of(name);
  if (gguf_ && contains(name)) {
    const std::vector<std::int64_t> own = this->shape(name);
    tessera::require(std::equal(own.begin(), own.end(), shape.begin(), shape.end()),
                     "shape of weight \"" + std::string(name) + "\"", own.empty() ? 0 : own.front(),
                     "the shape that the file's metadata tells of", "use a complete file");
    std::vector<float> values = gguf_weight(name);
    require_finite(name, values);
    return values;
  }
  tessera::require(file != nullptr, "weight \"" + std::string(name) + "\"", "missing", "a tensor of the checkpoint",
                   "use a complete checkpoint");
  std::vector<float> values = file->to_fp32(name, {shape.begin(), shape.size()});
  require_finite(name, values);
  return values;
}

std::vector<std::int64_t> checkpoint::shape(std::string_view name) const {
  if (gguf_) {
    const gguf_tensor* tensor = gguf_->find(gguf_name(name));
    return tensor ? tensor->shape : std::vector<std::int64_t>{};
  }
  const safetensors_file* file = file_of(name);
  return file ? file->at(name).shape : std::vector<std::int64_t>{};
}

void require_agreement(const std::filesystem::path& directory, const llama_config& config, const checkpoint& weights) {
  if (is_gguf(directory)) return;  // both come from one file
  const std::string place = "file " + printable((directory / "config.json").native()) + ": ";
  constexpr std::string_view cure = "take config.json and weights from one checkpoint";
  const auto layer = [&](std::int32_t index) {
    return weights.contains("model.layers." + std::to_string(index) + ".input_layernorm.weight");
  };
  std::int32_t layers = config.num_hidden_layers;
  while (layer(layers)) ++layers;
  tessera::require(layers == config.num_hidden_layers, place + "num_hidden_layers", config.num_hidden_layers,
                   std::to_string(layers) + ", which the weights have", cure);

  // Rows of another shape altogether are told by the weight's own name.
  const auto keys = weights.shape("model.layers.0.self_attn.k_proj.weight");
  if (keys.size() == 2 && keys[0] > 0 && keys[0] % config.head_dim == 0) {
    const std::int64_t heads = keys[0] / config.head_dim;
    const bool possible = heads <= config.num_attention_heads && config.num_attention_heads % heads == 0;
    tessera::require(heads == config.num_key_value_heads || !possible, place + "num_key_value_heads",
                     std::to_string(config.num_key_value_heads) + " (where it is missing: num_attention_heads)",
                     std::to_string(heads) + ", which the weights have", cure);
  }
  const auto embedding = weights.shape("model.embed_tokens.weight");
  if (embedding.size() == 2 && embedding[1] == config.hidden_size) {
    tessera::require(embedding[0] == config.vocab_size, place + "vocab_size", config.vocab_size,
                     std::to_string(embedding[0]) + ", which the weights have", cure);
  }
}

void require_agreement(const std::filesystem::path& directory, const llama_config& config, std::int32_t tokens) {
  require_agreement(directory, config, checkpoint::open(directory));
  const char* const name = there(directory / "tokenizer.model") ? "tokenizer.model" : "tokenizer.json";
  tessera::require(tokens == config.vocab_size, "file " + printable((directory / name).native()) + ": its vocabulary",
                   std::to_string(tokens) + " tokens",
                   std::to_string(config.vocab_size) + ", which config.json and the weights have",
                   "take the tokenizer that the model was trained with");
}

}  // namespace engine
