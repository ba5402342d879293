// The weights of a model folder: one model.safetensors, or the shards that model.safetensors.index.json lists.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "safetensors.hpp"

namespace engine {

/// The open weight files of one model.
class checkpoint {
 public:
  /// Opens every file, checks every header, reads no weight yet.
  /// Errors: neither file is there, the index is malformed or names a file outside the folder, a tensor that occurs
  /// in two shards, or whatever `safetensors_file::open` rejects.
  static checkpoint open(const std::filesystem::path& directory);

  bool contains(std::string_view name) const;

  /// A weight as fp32. Errors: it is missing, has another shape or an integer dtype, or holds NaN or infinity.
  std::vector<float> weight(std::string_view name, std::initializer_list<std::int64_t> shape) const;

 private:
  const safetensors_file* file_of(std::string_view name) const;

  std::vector<safetensors_file> files_;
};

}  // namespace engine
