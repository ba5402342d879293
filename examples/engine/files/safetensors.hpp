// Reading and writing safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

/// The element types that this reader and writer know.
enum class dtype { f32, f16, bf16, i32, i64, u8 };

std::string_view dtype_name(dtype type);      ///< as the file spells it: "F32", "BF16", ...
std::size_t dtype_bytes(dtype type);          ///< bytes of one element
inline constexpr std::int64_t any_size = -1;  ///< in an expected shape: this axis may have any length

/// One tensor of an open file. Points into the file's bytes, which may have no alignment, and never owns them.
struct tensor_view {
  dtype type;
  std::vector<std::int64_t> shape;  ///< slowest axis first; every length >= 0
  std::span<const std::byte> bytes;

  std::int64_t element_count() const { return std::int64_t(bytes.size() / dtype_bytes(type)); }
};

/// An open safetensors file: a checked header over bytes that it maps or borrows.
class safetensors_file {
 public:
  /// Maps a file into memory. Errors: unreadable, not a regular file, or anything that `parse` rejects; the message
  /// carries the path.
  static safetensors_file open(const std::filesystem::path& path);

  /// Reads a file that lies in memory; `bytes` must outlive the result.
  /// Errors: every departure from the format: a header cut short, longer than 100 MB or no JSON object; an unknown
  /// dtype; a shape that disagrees with its offsets; offsets out of range; and, as the format demands, tensors that
  /// overlap or leave bytes unclaimed, or a name that occurs twice.
  static safetensors_file parse(std::span<const std::byte> bytes);

  const std::map<std::string, tensor_view, std::less<>>& tensors() const { return tensors_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return tensors_.find(name) != tensors_.end(); }

  /// The tensor called `name`. Errors: there is none.
  const tensor_view& at(std::string_view name) const;

  /// A floating-point tensor as fp32, contiguous. `shape` is what the caller needs; `any_size` leaves an axis open.
  /// Errors: no such tensor, another shape, an integer dtype. NaN and infinity pass: see `require_finite`.
  std::vector<float> to_fp32(std::string_view name, std::span<const std::int64_t> shape) const;

  /// An integer tensor (I32, I64, U8), widened. Errors: no such tensor, another shape, a floating-point dtype.
  std::vector<std::int64_t> to_int64(std::string_view name, std::span<const std::int64_t> shape) const;

 private:
  std::shared_ptr<const std::byte> mapping_;  // empty when the bytes are borrowed
  std::map<std::string, tensor_view, std::less<>> tensors_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

/// Errors: a value is NaN or infinite; the message names the tensor and the first such element.
void require_finite(std::string_view name, std::span<const float> values);

/// Collects named tensors, then writes them in one go. Tensors are copied when added.
class safetensors_writer {
 public:
  /// Errors of every `add`: the name is used already, is "__metadata__", or `shape` does not hold `values.size()`
  /// elements.
  void add(std::string name, std::vector<std::int64_t> shape, std::span<const float> values);
  void add(std::string name, std::vector<std::int64_t> shape, std::span<const std::int32_t> values);
  void add(std::string name, std::vector<std::int64_t> shape, std::span<const std::int64_t> values);
  void add(std::string name, std::vector<std::int64_t> shape, std::span<const std::uint8_t> values);
  /// Rounds to `type` (F32, F16 or BF16) as it stores. Errors: as above, or an integer `type`.
  void add_rounded(std::string name, std::vector<std::int64_t> shape, std::span<const float> values, dtype type);

  /// Sets one entry of the file's string metadata, replacing an earlier one of that key.
  void set_metadata(std::string key, std::string value) { metadata_[std::move(key)] = std::move(value); }

  /// Writes as `write_file` does: a file as a whole or not at all. Errors: as there; a name is no UTF-8.
  void write(const std::filesystem::path& path) const;

 private:
  struct entry {
    dtype type;
    std::vector<std::int64_t> shape;
    std::vector<std::byte> bytes;
  };
  void add_bytes(std::string name, dtype type, std::vector<std::int64_t> shape, std::size_t count, const void* data);

  std::map<std::string, entry> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace engine
