// Gates of a model's heads as a file: found once by `tessera heads`, read by methods that class heads by them.
#pragma once

#include <filesystem>
#include <string>
#include <tessera/core/plan/share_table.hpp>
#include <vector>

namespace tool {

/// How much of what each kv_head looks at lies beyond the first `sinks` and the newest `recent` tokens.
struct head_gates {
  std::string model;  ///< where the model lay
  tessera::index_t layers = 0, kv_heads = 0, sinks = 0, recent = 0, questions = 0;
  std::vector<double> gates;  ///< [layers, kv_heads], in [0, 1]
};

/// The file's text: JSON with kind, version, model, sinks, recent, questions, and gates as a list for each layer.
std::string gates_text(const head_gates& found);

/// Errors: no JSON object, another kind of file, a newer version, layers of different numbers of heads, a gate outside [0, 1]; the
/// message names `source`.
head_gates parse_gates(std::string_view text, std::string_view source);

/// The table of a file, for a policy; the memory stays for the rest of the process. Errors: as `parse_gates`, and of opening.
tessera::share_table load_gates(const std::filesystem::path& path);

/// The file that a table was loaded from; "none" without one.
std::string gates_source(const tessera::share_table& table);

}  // namespace tool
