// What a person may name as an input or as a place for a result.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <tessera/core/error.hpp>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "engine/files/output_file.hpp"
#include "temporary_folder.hpp"

using engine_tests::temporary_folder;

namespace {

std::string content(const std::filesystem::path& path) { return engine::read_text_file(path); }

std::ptrdiff_t files_in(const std::filesystem::path& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

}  // namespace

TEST_CASE("output files appear whole or not at all") {
  const temporary_folder folder;
  engine::require_writable(folder / "new");
  CHECK_FALSE(std::filesystem::exists(folder / "new"));
  engine::write_file(folder / "new", "text");
  CHECK(content(folder / "new") == "text");
  engine::write_file(folder / "new", "other");
  CHECK(content(folder / "new") == "other");
  CHECK(files_in(folder.path()) == 1);
  CHECK_THROWS_WITH(engine::require_writable(folder / "absent/new"), contains("new is not writable"));
  CHECK_THROWS_WITH(engine::require_writable(folder.path()), contains("is a folder"));
  CHECK_THROWS_WITH(engine::write_file(folder.path(), "text"), contains("is a folder"));
  CHECK_THROWS_AS(engine::require_writable(""), tessera::error);
  CHECK(files_in(folder.path()) == 1);
}

TEST_CASE("a link keeps pointing, its target is replaced, and rights stay") {
  const temporary_folder folder;
  std::filesystem::create_directory(folder / "far");
  std::filesystem::create_symlink("far/second", folder / "first");
  std::filesystem::create_symlink("target", folder / "far/second");
  for (const std::string text : {"one", "two"}) {
    engine::write_file(folder / "first", text);
    CHECK(std::filesystem::is_symlink(folder / "first"));
    CHECK(std::filesystem::is_symlink(folder / "far/second"));
    CHECK(content(folder / "far/target") == text);
    ::chmod((folder / "far/target").c_str(), 0640);
  }
  engine::write_file(folder / "first", "three");
  struct stat status{};
  REQUIRE(::stat((folder / "far/target").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0640);
}

TEST_CASE("a file without write permission is refused, whoever asks") {
  const temporary_folder folder;
  engine::write_file(folder / "closed", "precious");
  ::chmod((folder / "closed").c_str(), 0444);
  CHECK_THROWS_WITH(engine::require_writable(folder / "closed"), contains("no permission"));
  CHECK_THROWS_WITH(engine::write_file(folder / "closed", "text"), contains("no permission"));
  CHECK(content(folder / "closed") == "precious");
}

TEST_CASE("a device is written to and stays a device") {
  engine::require_writable("/dev/null");
  engine::write_file("/dev/null", "text");
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK_THROWS_WITH(engine::write_file("/dev/full", "text"), contains("No space left"));
}

TEST_CASE("inputs that cannot be read are told apart, and none makes anybody wait") {
  const temporary_folder folder;
  ::mkfifo((folder / "fifo").c_str(), 0600);
  CHECK_THROWS_WITH(content(folder / "absent"), contains("is missing"));
  CHECK_THROWS_WITH(content(folder.path()), contains("is a folder"));
  CHECK_THROWS_WITH(content(folder / "fifo"), contains("is a FIFO"));
  CHECK_THROWS_WITH(content("/dev/zero"), contains("is a device"));
  CHECK_THROWS_WITH(content(std::string(5000, 'x')), contains("too long"));
  CHECK_THROWS_WITH(content("/proc/self/mem"), contains("not readable"));
}

TEST_CASE("text for a message is cut, and shows what it holds instead of doing it") {
  CHECK(engine::printable("plain text") == "plain text");
  CHECK(engine::printable("\x1b[2J\n\x7f") == "\\x1b[2J\\x0a\\x7f");
  CHECK(engine::printable("gr\u00fc\u00df") == "gr\u00fc\u00df");
  CHECK(engine::printable("\xff\xc3") == "\\xff\\xc3");
  CHECK(engine::printable("\xc2\x9b") == "\\xc2\\x9b");
  CHECK(engine::printable(std::string(200, 'x'), 5) == "xxxxx...");
  CHECK(engine::printable("gr\u00fc", 3) == "gr...");
}
