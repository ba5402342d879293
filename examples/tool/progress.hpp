// A line on stderr that says how far a long command is.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace tool {

/// Shows "what: done of total, elapsed, remaining" once something takes more than two seconds. On a terminal the line
/// is rewritten in place and removed at the end; elsewhere a new line is written now and then.
class progress_line {
 public:
  explicit progress_line(std::string what);
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line();

  void update(std::int64_t done, std::int64_t total);

 private:
  using clock = std::chrono::steady_clock;

  std::string what_;
  bool on_terminal_;
  bool shown_ = false;
  clock::time_point start_, last_;
};

/// "4.2 s", "3 min 05 s"
std::string duration_text(double seconds);

}  // namespace tool
