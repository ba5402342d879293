#include "output_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string_view>
#include <system_error>
#include <tessera/core/error.hpp>
#include <thread>
#include <utility>

#include "input_file.hpp"

namespace engine {
namespace {

using part = std::span<const std::byte>;

std::string system_text(int problem) { return std::generic_category().message(problem); }

class descriptor {
 public:
  explicit descriptor(int value = -1) : value_(value) {}
  descriptor(const descriptor&) = delete;
  descriptor& operator=(const descriptor&) = delete;
  ~descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  int get() const { return value_; }
  explicit operator bool() const { return value_ >= 0; }
  // Closes at once and tells whether that worked: a full disk may show here only.
  bool close() { return ::close(std::exchange(value_, -1)) == 0; }

 private:
  int value_;
};

// What a signal handler has to remove: the folder's descriptor and a name in it.
volatile std::sig_atomic_t unfinished_folder = -1;
char unfinished_name[32];

// A file beside the target, gone unless it takes the target's place. Its name is short, whatever the target's is.
class temporary_file {
 public:
  temporary_file(int folder, mode_t mode) : folder_(folder) {
    static unsigned counter = 0;
    for (int attempt = 0; attempt < 100; ++attempt) {
      std::snprintf(unfinished_name, sizeof unfinished_name, ".tessera-%ld-%u", long(::getpid()), counter++);
      unfinished_folder = folder;
      descriptor_ = ::openat(folder, unfinished_name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
      if (descriptor_ >= 0 || errno != EEXIST) break;
    }
    if (descriptor_ < 0) unfinished_folder = -1;
  }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;
  ~temporary_file() {
    if (descriptor_ >= 0) ::close(descriptor_);
    remove_unfinished_output();
  }
  int get() const { return descriptor_; }
  bool close() { return ::close(std::exchange(descriptor_, -1)) == 0; }
  bool rename_to(const char* target) {
    if (::renameat(folder_, unfinished_name, folder_, target) != 0) return false;
    unfinished_folder = -1;
    return true;
  }

 private:
  int folder_;
  int descriptor_ = -1;
};

// Where a path leads once its links are followed; the last one need not exist.
std::filesystem::path followed(std::filesystem::path path) {
  struct stat status{};
  for (int links = 0; links < 40 && ::lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode); ++links) {
    std::error_code problem;
    const auto next = std::filesystem::read_symlink(path, problem);
    if (problem) break;
    path = next.is_absolute() ? next : path.parent_path() / next;
  }
  return path;
}

struct target {
  std::string name;            // for messages
  std::filesystem::path path;  // links followed
  bool exists = false, stream = false;
  struct stat status{};
};

// Errors: a folder, a missing folder, a file that may not be written.
target look_at(const std::filesystem::path& path) {
  target found{"output file " + printable(path.native()), path, false, false, {}};
  constexpr std::string_view allowed = "a file in a folder that exists";
  tessera::require(!path.filename().empty(), found.name, "without a file name", allowed, "add one");
  found.exists = ::stat(path.c_str(), &found.status) == 0;
  if (!found.exists && errno != ENOENT) {
    tessera::fail(found.name, "not writable (" + system_text(errno) + ")", allowed, "pass another path");
  }
  if (found.exists) {
    const mode_t mode = found.status.st_mode;
    tessera::require(!S_ISDIR(mode), found.name, "a folder", allowed, "add a file name");
    // Root may write anything: the bits tell what its owner meant.
    const bool closed = ::access(path.c_str(), W_OK) != 0 || (S_ISREG(mode) && (mode & 0222) == 0);
    tessera::require(!closed, found.name, "closed for writing (no permission)", "a file that may be written",
                     "change its rights, or pass another path");
    found.stream = !S_ISREG(mode);
  }
  // What lies behind /dev/stdout and the like is somebody's open file: written to, never replaced.
  const std::string_view text = path.native();
  found.stream = found.stream || (found.exists && (text.starts_with("/dev/") || text.starts_with("/proc/")));
  if (!found.stream) found.path = followed(path);
  return found;
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  const auto folder = path.parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

bool write_all(int to, std::span<const part> parts) {
  for (part left : parts) {
    while (!left.empty()) {
      const ssize_t written = ::write(to, left.data(), left.size());
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return false;
      left = left.subspan(std::size_t(written));
    }
  }
  return true;
}

[[noreturn]] void fail_to_write(const target& to, int problem) {
  tessera::fail(to.name, "not written (" + system_text(problem) + ")", "room for the file",
                "free some space, or pass another path");
}

// A FIFO opens for writing once somebody reads it.
int open_stream(const target& to) {
  for (int tenths = 0;; ++tenths) {
    const int opened = ::open(to.path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened >= 0) {
      ::fcntl(opened, F_SETFL, ::fcntl(opened, F_GETFL) & ~O_NONBLOCK);
      return opened;
    }
    if (errno != ENXIO || !S_ISFIFO(to.status.st_mode)) return -1;
    tessera::require(tenths < 100, to.name, "a FIFO that nobody reads", "a reader within ten seconds",
                     "start the reader first");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

void write_stream(const target& to, std::span<const part> parts) {
  descriptor file(open_stream(to));
  if (!file || !write_all(file.get(), parts) || !file.close()) fail_to_write(to, errno);
}

void write_in_place(const target& to, std::span<const part> parts) {
  descriptor file(::open(to.path.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC));
  if (!file || !write_all(file.get(), parts) || ::fsync(file.get()) != 0 || !file.close()) fail_to_write(to, errno);
}

// Returns false where the target has to be written in place.
bool replace(const target& to, std::span<const part> parts) {
  const descriptor folder(::open(folder_of(to.path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder && to.exists) return false;
  if (!folder) fail_to_write(to, errno);
  temporary_file temporary(folder.get(), to.exists ? to.status.st_mode & 0666 : 0666);
  if (temporary.get() < 0 && to.exists) return false;
  if (temporary.get() < 0) fail_to_write(to, errno);
  if (to.exists) {
    // As far as this user may: the new content belongs to whom the old one did.
    [[maybe_unused]] const int owner = ::fchown(temporary.get(), to.status.st_uid, to.status.st_gid);
    ::fchmod(temporary.get(), to.status.st_mode & 07777);
  }
  if (!write_all(temporary.get(), parts) || ::fsync(temporary.get()) != 0 || !temporary.close())
    fail_to_write(to, errno);
  if (temporary.rename_to(to.path.filename().c_str())) return true;
  if (to.exists && (errno == EBUSY || errno == EXDEV || errno == EPERM)) return false;
  fail_to_write(to, errno);
}

}  // namespace

void require_writable(const std::filesystem::path& path) {
  const target to = look_at(path);
  if (to.exists) return;
  const descriptor folder(::open(folder_of(to.path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder && ::faccessat(folder.get(), ".", W_OK | X_OK, 0) == 0) return;
  tessera::fail(to.name, "not writable (" + system_text(errno) + ")", "a file in a folder that exists",
                "make the folder, or pass another path");
}

void write_file(const std::filesystem::path& path, std::span<const part> parts) {
  const target to = look_at(path);
  if (to.stream) return write_stream(to, parts);
  if (!replace(to, parts)) write_in_place(to, parts);
}

void write_file(const std::filesystem::path& path, const std::string& content) {
  const part whole = std::as_bytes(std::span(content));
  write_file(path, std::span(&whole, 1));
}

void remove_unfinished_output() noexcept {
  const int folder = int(unfinished_folder);
  if (folder >= 0) ::unlinkat(folder, unfinished_name, 0);
  unfinished_folder = -1;
}

}  // namespace engine
