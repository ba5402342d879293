#include "input_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <tessera/core/error.hpp>

namespace engine {
namespace {

constexpr std::size_t longest_text = std::size_t(256) << 20;

[[noreturn]] void fail_to_open(const std::string& name, int problem, std::string_view wanted) {
  const std::string expected(wanted);
  switch (problem) {
    case ENOENT:
    case ENOTDIR:
      tessera::fail(name, "missing", expected, "check the path");
    case EACCES:
    case EPERM:
      tessera::fail(name, "closed to you (no permission)", expected, "change its rights or its folder's");
    case ENAMETOOLONG:
      tessera::fail(name, "a name that is too long", expected, "check the path");
    default:
      tessera::fail(name, "not readable (" + std::generic_category().message(problem) + ")", expected,
                    "check the path");
  }
}

// Everything up to the end. Errors: a read that fails, more than the limit.
std::string read_all(int descriptor, const std::string& name) {
  std::string text;
  char block[1 << 16];
  for (;;) {
    const ssize_t got = ::read(descriptor, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      tessera::fail(name, "not readable (" + std::generic_category().message(errno) + ")", "text",
                    "check the path and the disk");
    }
    if (got == 0) return text;
    text.append(block, std::size_t(got));
    tessera::require(text.size() <= longest_text, name, "longer than 256 MiB", "at most 256 MiB of text",
                     "pass a part of it");
  }
}

// Bytes of the character that a text begins with; 0 where that is a control character or no UTF-8.
std::size_t character_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool control = first == 0xc2 && second < 0xa0;
  const bool none = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                    (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return control || none ? 0 : length;
}

}  // namespace

input_file::input_file(const std::filesystem::path& path, std::string_view wanted)
    : name_("file " + printable(path.native())) {
  // Non-blocking, or opening a FIFO that nobody writes to would wait for ever.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat status{};
  if (descriptor_ < 0) fail_to_open(name_, errno, wanted);
  const int problem = ::fstat(descriptor_, &status) != 0 ? errno : 0;
  if (problem != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    if (problem != 0) fail_to_open(name_, problem, wanted);
    tessera::fail(name_,
                  S_ISDIR(status.st_mode)    ? "a folder"
                  : S_ISFIFO(status.st_mode) ? "a FIFO"
                                             : "a device",
                  std::string(wanted) + ", a regular file",
                  S_ISDIR(status.st_mode) ? "name a file in it" : "write its content to a file first");
  }
  size_ = std::size_t(status.st_size);
}

input_file::~input_file() { ::close(descriptor_); }

bool there(const std::filesystem::path& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

std::string read_text_file(const std::filesystem::path& path) {
  if (path == "-") {
    static const std::string all = read_all(STDIN_FILENO, "standard input");  // a profile is read for every cache
    return all;
  }
  const input_file file(path, "text");
  return read_all(file.descriptor(), file.name());
}

std::string printable(std::string_view text, std::size_t most) {
  std::string shown;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = character_length(text.substr(i));
    if (shown.size() + std::max<std::size_t>(length, 1) > most) return shown + "...";
    if (length > 0) {
      shown += text.substr(i, length);
      i += length;
    } else {
      constexpr char digits[] = "0123456789abcdef";
      const auto code = static_cast<unsigned char>(text[i++]);
      shown += std::string("\\x") + digits[code >> 4] + digits[code & 15];
    }
  }
  return shown;
}

}  // namespace engine
