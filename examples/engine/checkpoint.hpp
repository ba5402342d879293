// The weights of a model: one model.safetensors, the shards that model.safetensors.index.json lists, or a GGUF file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config.hpp"
#include "engine/files/gguf.hpp"
#include "engine/files/safetensors.hpp"

namespace engine {

/// The open weight files of one model. Names are those of Hugging Face's checkpoints, whatever the file calls them.
class checkpoint {
 public:
  /// Opens every file of a folder, or a GGUF file; checks every header, reads no weight yet.
  /// Errors: neither file is there, the index is malformed or names a file outside the folder, a tensor that occurs
  /// in two shards, or whatever `safetensors_file::open` rejects.
  static checkpoint open(const std::filesystem::path& model);

  bool contains(std::string_view name) const;

  /// A weight's shape; empty where there is none.
  std::vector<std::int64_t> shape(std::string_view name) const;

  /// A weight as fp32. Errors: it is missing, has another shape or an integer dtype, or holds NaN or infinity.
  std::vector<float> weight(std::string_view name, std::initializer_list<std::int64_t> shape) const;

 private:
  const safetensors_file* file_of(std::string_view name) const;

  std::vector<float> gguf_weight(std::string_view name) const;

  std::vector<safetensors_file> files_;
  std::optional<gguf_file> gguf_;  // in place of these
};

/// Refuses a config.json that tells of another model than the weights beside it: fewer layers, other KV heads, another
/// vocabulary. Errors: tessera::error that names config.json, what it says and what the weights have.
void require_agreement(const std::filesystem::path& directory, const llama_config& config, const checkpoint& weights);

/// As above, and refuses a tokenizer whose vocabulary is not the model's; `tokens` is how many it has.
void require_agreement(const std::filesystem::path& directory, const llama_config& config, std::int32_t tokens);

}  // namespace engine
