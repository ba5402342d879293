// tessera: what KV-cache compressors do to a model's answers, from the command line.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <stdexcept>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "progress.hpp"
#include "tool/cli/command_options.hpp"
#include "tool/eval/report.hpp"
#include "tool/methods/values.hpp"

#define TESSERA_TEXT_OF(number) #number
#define TESSERA_VERSION_AS(major, minor, patch) \
  TESSERA_TEXT_OF(major) "." TESSERA_TEXT_OF(minor) "." TESSERA_TEXT_OF(patch)
#define TESSERA_VERSION_TEXT TESSERA_VERSION_AS(TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH)

namespace {

constexpr int bad_input = 2;

// What is opened later must not take the number of a standard stream that is closed: what is printed would land in it.
void hold_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(stream, F_GETFD) < 0) [[maybe_unused]]
      const int taken = ::open("/", O_RDONLY);  // neither reads nor writes
  }
}

// Returns 0, or the error that kept what was printed from getting out.
int flush_output() {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return 0;
  // The first failure may be long ago: one more attempt says why.
  std::clearerr(stdout);
  errno = 0;
  std::fputc('\n', stdout);
  std::fflush(stdout);
  return errno != 0 ? errno : EIO;
}

// One sentence on stderr, whatever the message holds.
int refuse(std::string_view message) {
  std::string text(message);
  std::ranges::replace(text, '\n', ' ');
  std::fprintf(stderr, "tessera: %s\n", engine::printable(text, 2000).c_str());
  return bad_input;
}

// The size of the last allocation that failed.
std::atomic<std::size_t> refused_bytes = 0;

std::string memory_text() {
  const std::string work = tool::progress_line::newest();
  std::string text = "not enough memory" + (work.empty() ? "" : " while " + work);
  if (refused_bytes > 0) text += ": " + tool::bytes_text(double(refused_bytes)) + " more were refused";
  return text +
         "; expected room for the weights, the prompt and a cache for each method; "
         "shorten the prompt, name fewer methods, or raise the limit";
}

// Errors: the first argument is no command and no option.
void require_command(const CLI::App& app, int count, char** arguments) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  tessera::require(count > 1, "command", "missing", "one of " + tool::joined(names), "see tessera --help");
  if (arguments[1][0] != '-') tool::require_one_of("command", arguments[1], names);
}

int run(int count, char** arguments) {
  CLI::App app{
      "Runs a language model, or one layer's tensors, with a compressed KV cache.\n"
      "Start with `tessera list`; every command explains itself with --help.",
      "tessera"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION_TEXT, "print the version");
  tool::add_commands(app);
  try {
    require_command(app, count, arguments);
    app.parse(count, arguments);
    return 0;
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& problem) {
    return refuse(std::string(problem.what()) + "; see tessera --help, or --help behind a command");
  } catch (const tool::interrupted& end) {
    return 128 + end.signal;
  } catch (const tessera::error& problem) {
    return refuse(problem.what());
  } catch (const std::bad_alloc&) {
    return refuse(memory_text());
  } catch (const std::length_error&) {
    return refuse(memory_text());
  } catch (const std::exception& problem) {
    refuse(std::string("internal error: ") + problem.what());
    return 1;
  }
}

}  // namespace

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(__has_feature)
// As the library's own, and it remembers how much could not be had.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (void* memory = std::malloc(size > 0 ? size : 1)) return memory;
  refused_bytes = size;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

int main(int count, char** arguments) {
  hold_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);  // a reader that goes is an error of writing, not the end
  std::signal(SIGXFSZ, SIG_IGN);  // so is a limit on the size of files
  tool::end_on_signals();
  const int code = run(count, arguments);
  if (const int problem = flush_output(); problem != 0 && code == 0) {
    std::fprintf(stderr, "tessera: standard output is not writable (%s); expected a place to print to; redirect it\n",
                 std::strerror(problem));
    return bad_input;
  }
  return code;
}
