#include "checkpoint.hpp"

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

}  // namespace

checkpoint checkpoint::open(const std::filesystem::path& directory) {
  checkpoint opened;
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

bool checkpoint::contains(std::string_view name) const { return file_of(name) != nullptr; }

std::vector<float> checkpoint::weight(std::string_view name, std::initializer_list<std::int64_t> shape) const {
  const safetensors_file* file = file_of(name);
  tessera::require(file != nullptr, "weight \"" + std::string(name) + "\"", "missing", "a tensor of the checkpoint",
                   "use a complete Llama checkpoint");
  std::vector<float> values = file->to_fp32(name, {shape.begin(), shape.size()});
  require_finite(name, values);
  return values;
}

std::vector<std::int64_t> checkpoint::shape(std::string_view name) const {
  const safetensors_file* file = file_of(name);
  return file ? file->at(name).shape : std::vector<std::int64_t>{};
}

void require_agreement(const std::filesystem::path& directory, const llama_config& config, const checkpoint& weights) {
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
  tessera::require(tokens == config.vocab_size,
                   "file " + printable((directory / "tokenizer.model").native()) + ": its vocabulary",
                   std::to_string(tokens) + " tokens",
                   std::to_string(config.vocab_size) + ", which config.json and the weights have",
                   "take the tokenizer that the model was trained with");
}

}  // namespace engine
