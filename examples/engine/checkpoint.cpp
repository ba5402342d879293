#include "checkpoint.hpp"

#include <nlohmann/json.hpp>
#include <set>
#include <tessera/core/error.hpp>

#include "config.hpp"
#include "input_file.hpp"

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

}  // namespace engine
