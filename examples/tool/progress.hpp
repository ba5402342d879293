// What a running command tells a person on stderr, and how a person ends it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace tool {

/// "tessera: note: TEXT" on stderr: what is worth knowing and stops nothing.
void note(const std::string& text);

/// Shows "what: done of total, elapsed, remaining" once something takes more than two seconds, whether or not `update` is
/// called. On a terminal a bar is rewritten in place and removed at the end; elsewhere a new line is written now and
/// then. A thread of its own paints; where the system gives none, one line says at once what is being done.
class progress_line {
 public:
  explicit progress_line(std::string what);
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line();

  void update(std::int64_t done, std::int64_t total);

  /// What the newest line was made for, kept when it goes: for messages.
  static const std::string& newest();

 private:
  using clock = std::chrono::steady_clock;

  void paint_now_and_then();
  std::string text() const;  // with the mutex held

  std::string what_;
  bool on_terminal_;
  clock::time_point start_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ending_ = false, shown_ = false;
  std::int64_t done_ = 0, total_ = 0;
  std::thread painter_;
};

/// "4.2 s", "3 min 05 s"
std::string duration_text(double seconds);

/// Thrown where a command can stop and still say what it has.
struct interrupted {
  int signal;
};

/// From now on SIGINT, SIGTERM and SIGHUP end the program with 128 + signal and leave no temporary file.
void end_on_signals();

/// While one lives, the first signal only makes `throw_if_interrupted` throw; a second one ends the program.
class gentle_end {
 public:
  gentle_end();
  gentle_end(const gentle_end&) = delete;
  gentle_end& operator=(const gentle_end&) = delete;
  ~gentle_end();
};
void throw_if_interrupted();

/// Runs `total` items, called `what` in a progress line, then `report(finished, seconds)` where any are finished.
/// A signal ends them: what `run` throws of it is thrown again behind the report and a sentence on stderr.
void run_items(const std::string& what, std::size_t total, const std::function<void(std::size_t)>& run,
               const std::function<void(std::size_t, double)>& report);

}  // namespace tool
