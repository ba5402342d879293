// Opening what a person names as an input: one behaviour and one set of sentences for every kind of file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace engine {

/// An open regular file. Errors of opening, each told apart: missing, no permission, a folder, a FIFO or device, a name
/// that is too long; the message begins with "file PATH".
class input_file {
 public:
  /// `wanted`: what the file should be, as "a safetensors file".
  input_file(const std::filesystem::path& path, std::string_view wanted);
  input_file(const input_file&) = delete;
  input_file& operator=(const input_file&) = delete;
  ~input_file();

  int descriptor() const { return descriptor_; }
  std::size_t size() const { return size_; }
  /// "file PATH", a long one cut.
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  int descriptor_ = -1;
  std::size_t size_ = 0;
};

/// Whether something is there; false for a missing file only, so that whatever else is wrong is said when it is opened.
bool there(const std::filesystem::path& path);

/// The whole of a text file; "-" is standard input. Errors: as input_file; unreadable; more than 256 MiB.
std::string read_text_file(const std::filesystem::path& path);

/// Text that somebody else wrote, fit for a message: control characters as \xNN, cut to `most` bytes.
std::string printable(std::string_view text, std::size_t most = 120);

}  // namespace engine
