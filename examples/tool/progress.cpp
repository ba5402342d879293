#include "progress.hpp"

#include <unistd.h>

#include <cstdio>

namespace tool {

progress_line::progress_line(std::string what)
    : what_(std::move(what)), on_terminal_(isatty(STDERR_FILENO) != 0), start_(clock::now()), last_(start_) {}

progress_line::~progress_line() {
  if (shown_ && on_terminal_) std::fputs("\r\033[K", stderr);
}

void progress_line::update(std::int64_t done, std::int64_t total) {
  const auto now = clock::now();
  const double pause = !shown_ ? 2.0 : on_terminal_ ? 0.2 : 5.0;
  if (std::chrono::duration<double>(now - last_).count() < pause) return;
  last_ = now;
  shown_ = true;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  std::string text =
      what_ + ": " + std::to_string(done) + " of " + std::to_string(total) + ", " + duration_text(elapsed) + " so far";
  if (done > 0) text += ", about " + duration_text(elapsed * double(total - done) / double(done)) + " left";
  std::fputs(on_terminal_ ? ("\r\033[K" + text).c_str() : (text + "\n").c_str(), stderr);
  std::fflush(stderr);
}

std::string duration_text(double seconds) {
  char text[48];
  if (seconds < 60) {
    std::snprintf(text, sizeof text, "%.1f s", seconds);
  } else {
    const long whole = long(seconds + 0.5);
    std::snprintf(text, sizeof text, "%ld min %02ld s", whole / 60, whole % 60);
  }
  return text;
}

}  // namespace tool
