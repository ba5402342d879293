// Reading GGUF files: little-endian numbers, key-value pairs, then tensors, most of them quantised in blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace engine {

/// How a tensor's elements are stored. Blocks hold 32 elements, those of K types 256.
struct gguf_encoding {
  std::uint32_t id;       ///< as the file spells it
  std::string_view name;  ///< "Q4_1"
  std::int64_t block_elements, block_bytes;
  void (*decode)(const std::byte* block, float* to);  ///< one block
};

/// One tensor of an open file.
struct gguf_tensor {
  const gguf_encoding* encoding = nullptr;
  std::vector<std::int64_t> shape;  ///< slowest axis first
  std::span<const std::byte> bytes;
};

/// A value of the file's metadata. Whole numbers of every width are 64 bits; of arrays those of texts, whole numbers and
/// numbers are read, and others are passed over.
using gguf_value = std::variant<std::int64_t, double, bool, std::string, std::vector<std::string>,
                                std::vector<std::int64_t>, std::vector<double>>;

/// An open GGUF file, version 2 or 3: checked metadata and tensors over bytes that it maps or borrows.
class gguf_file {
 public:
  /// Maps a file into memory. Errors: unreadable, not a regular file, or anything that `parse` rejects; the message
  /// carries the path.
  static gguf_file open(const std::filesystem::path& path);

  /// Reads a file that lies in memory; `bytes` must outlive the result.
  /// Errors: another magic or version; a count, length or offset that leads out of the file; an unknown type of value or
  /// tensor; a row that is not whole blocks; a name that occurs twice: tessera::error.
  static gguf_file parse(std::span<const std::byte> bytes);

  const std::map<std::string, gguf_tensor, std::less<>>& tensors() const { return tensors_; }
  const gguf_tensor* find(std::string_view name) const;
  /// The elements of a tensor as fp32, contiguous. Errors: no such tensor.
  std::vector<float> to_fp32(std::string_view name) const;

  /// The value of a key; null where there is none.
  const gguf_value* value(std::string_view key) const;
  /// Values that must be there. Errors: a missing key, a value of another kind.
  std::int64_t count(std::string_view key) const;
  double number(std::string_view key) const;
  const std::string& text(std::string_view key) const;
  const std::vector<std::string>& texts(std::string_view key) const;

 private:
  std::shared_ptr<const std::byte> mapping_;  // empty when the bytes are borrowed
  std::map<std::string, gguf_value, std::less<>> values_;
  std::map<std::string, gguf_tensor, std::less<>> tensors_;
};

/// Whether a path names a GGUF file, by its ending.
bool is_gguf(const std::filesystem::path& path);

}  // namespace engine
