// What methods cannot be made without: DuoAttention wants the gates of a model's heads in a file.
#pragma once

#include <fstream>
#include <string>
#include <vector>

#include "temporary_folder.hpp"
#include "tool/heads/gates.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool_tests {

/// Settings that name such a file, made for a model of these counts, where the method wants one.
inline std::vector<tool::setting> needed_settings(const std::string& method, tessera::index_t layers,
                                                  tessera::index_t kv_heads) {
  static const engine_tests::temporary_folder folder;
  if (method != "duo_attention") return {};
  const auto path = folder / ("gates_" + std::to_string(layers) + "_" + std::to_string(kv_heads));
  const std::vector<double> gates(std::size_t(layers * kv_heads), 0.5);
  std::ofstream(path) << tool::gates_text({"a model", layers, kv_heads, 4, 16, 1, gates});
  return {{"profile", path.string()}};
}

}  // namespace tool_tests
