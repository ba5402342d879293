// A conversation as a file: which model it is with, the last reply, and the cache's own bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/tokenizer.hpp"
#include "tool/methods/method_cache.hpp"

namespace tool {

/// Tells a model from others: names and sizes of its files, and a part of their bytes, at both ends of each.
/// Errors: files that cannot be read.
std::uint64_t digest_of_model(const std::filesystem::path& model);

/// What a conversation goes on from, beside its cache.
struct session_state {
  std::vector<engine::token_t> reply;  ///< the last one; its last token has not passed through the model
  bool rotates = false;                ///< channels are mixed before rows are stored: the setting `rotate`
};

/// `model`: its digest. Writes a file that replaces one of the same name only once it is whole.
/// Errors: what the cache refuses; a file that cannot be written.
void save_session(const std::string& path, std::uint64_t model, const session_state& state, method_cache& cache);

/// Reads it into an empty cache, which `rotates` or does not.
/// Errors: no such file; bytes that are cut or damaged; another model, method or parameter.
session_state load_session(const std::string& path, std::uint64_t model, bool rotates, method_cache& cache);

}  // namespace tool
