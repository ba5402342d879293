#include "session_file.hpp"

#include <algorithm>
#include <fstream>
#include <tessera/runtime/saved/archive.hpp>

#include "engine/files/input_file.hpp"

namespace tool {
namespace {

/// Tokens of a reply that a file may have.
constexpr offset_t longest_reply = offset_t(1) << 24;

/// What is added to a model's digest where channels are mixed before rows are stored.
constexpr std::uint64_t rotated = 0x9e3779b97f4a7c15u;

template <class Archive>
void transfer(std::uint64_t model, bool rotates, tessera::host_vector<engine::token_t>& reply, Archive& archive) {
  std::uint64_t saved = rotates ? model + rotated : model;
  archive.number(saved);
  const std::uint64_t other = rotates ? model : model + rotated;
  tessera::require(saved != other, "rotate of the saved conversation", rotates ? "none" : "hadamard",
                   rotates ? "hadamard" : "none", "pass the settings that it was held with");
  if (rotates) saved -= rotated;
  tessera::require(saved == model, "model of the saved conversation", "another", "the one of --model",
                   "load it with the model that it was held with");
  archive.numbers(reply, longest_reply);
  for (const engine::token_t token : reply) archive.require(token >= 0, "with tokens that cannot be");
}

/// Size of a file, and the checksum of its first and last 64 KiB.
std::uint64_t digest_of_file(const std::filesystem::path& path) {
  constexpr std::uintmax_t part = 1 << 16;
  const std::uintmax_t size = std::filesystem::file_size(path);
  std::vector<char> bytes(std::size_t(std::min(size, 2 * part)));
  std::ifstream file(path, std::ios::binary);
  const std::size_t first = std::size_t(std::min(size, part));
  file.read(bytes.data(), std::streamsize(first));
  file.seekg(std::streamoff(size - (bytes.size() - first)));
  file.read(bytes.data() + first, std::streamsize(bytes.size() - first));
  tessera::require(bool(file), "file " + engine::printable(path.string()), "unreadable", "one that can be read",
                   "check its permissions");
  return tessera::checksum_term(size, tessera::checksum(bytes.data(), bytes.size()));
}

}  // namespace

std::uint64_t digest_of_model(const std::filesystem::path& model) {
  if (!std::filesystem::is_directory(model)) return digest_of_file(model);
  std::uint64_t sum = 0;  // in any order of the files
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_regular_file())
      sum += tessera::checksum_term(digest_of_file(entry.path()), tessera::checksum(name.data(), name.size()));
  }
  return sum;
}

void save_session(const std::string& path, std::uint64_t model, const session_state& state, method_cache& cache) {
  const std::string unfinished = path + ".part";
  std::ofstream file(unfinished, std::ios::binary);
  const auto sink = [&](const void* data, std::size_t bytes) {
    file.write(static_cast<const char*>(data), std::streamsize(bytes));
    tessera::require(bool(file), "file " + engine::printable(path), "not written", "one that can be written",
                     "check the folder and the room on the disk");
  };
  try {
    tessera::saved_writer archive(sink);
    tessera::host_vector<engine::token_t> reply(state.reply.begin(), state.reply.end());
    transfer(model, state.rotates, reply, archive);
    archive.end();
    cache.save(sink);
    file.close();
    tessera::require(bool(file), "file " + engine::printable(path), "not written", "one that can be written",
                     "check the folder and the room on the disk");
    std::filesystem::rename(unfinished, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(unfinished, ignored);
    throw;
  }
}

session_state load_session(const std::string& path, std::uint64_t model, bool rotates, method_cache& cache) {
  std::ifstream file(path, std::ios::binary);
  tessera::require(bool(file), "saved conversation " + engine::printable(path), "missing", "a file that --save wrote",
                   "check the name");
  const auto source = [&](void* data, std::size_t bytes) {
    file.read(static_cast<char*>(data), std::streamsize(bytes));
    return std::size_t(file.gcount());
  };
  tessera::saved_reader archive(source);
  tessera::host_vector<engine::token_t> reply;
  transfer(model, rotates, reply, archive);
  archive.end();
  cache.load(source);
  return {{reply.begin(), reply.end()}, rotates};
}

}  // namespace tool
