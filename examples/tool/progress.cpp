#include "progress.hpp"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <optional>
#include <system_error>

#include "engine/files/output_file.hpp"

namespace tool {
namespace {

std::string newest_work;

volatile std::sig_atomic_t gentle = 0, pending = 0;

void on_signal(int signal) {
  if (gentle && !pending) {
    pending = signal;
    return;
  }
  engine::remove_unfinished_output();
  constexpr char text[] = "tessera: interrupted\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, sizeof text - 1);
  ::_exit(128 + signal);
}

}  // namespace

void note(const std::string& text) { std::fprintf(stderr, "tessera: note: %s\n", text.c_str()); }

progress_line::progress_line(std::string what)
    : what_(std::move(what)), on_terminal_(isatty(STDERR_FILENO) != 0), start_(clock::now()) {
  newest_work = what_;
  try {
    painter_ = std::thread([this] { paint_now_and_then(); });
  } catch (const std::system_error&) {
    std::fprintf(stderr, "%s ...\n", what_.c_str());
  }
}

progress_line::~progress_line() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  end_.notify_all();
  if (painter_.joinable()) painter_.join();
  if (shown_ && on_terminal_) std::fputs("\r\033[K", stderr);
}

const std::string& progress_line::newest() { return newest_work; }

void progress_line::update(std::int64_t done, std::int64_t total) {
  std::lock_guard lock(mutex_);
  done_ = done;
  total_ = total;
}

void progress_line::paint_now_and_then() {
  std::unique_lock lock(mutex_);
  for (auto pause = std::chrono::milliseconds(2000); !end_.wait_for(lock, pause, [this] { return ending_; });) {
    shown_ = true;
    std::fputs(on_terminal_ ? ("\r\033[K" + text()).c_str() : (text() + "\n").c_str(), stderr);
    std::fflush(stderr);
    pause = std::chrono::milliseconds(on_terminal_ ? 200 : 5000);
  }
}

std::string progress_line::text() const {
  const double elapsed = std::chrono::duration<double>(clock::now() - start_).count();
  if (total_ <= 0) return what_ + ": " + duration_text(elapsed) + " so far";
  std::string all;
  if (on_terminal_) {
    constexpr std::int64_t width = 24;
    const auto full = std::size_t(std::clamp<std::int64_t>(width * done_ / total_, 0, width));
    all = "[" + std::string(full, '=') + std::string(width - full, ' ') + "] ";
  }
  all += what_ + ": " + std::to_string(done_) + " of " + std::to_string(total_) + ", " + duration_text(elapsed) +
         " so far";
  if (done_ > 0) all += ", about " + duration_text(elapsed * double(total_ - done_) / double(done_)) + " left";
  return all;
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

void end_on_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction now{};
    ::sigaction(signal, nullptr, &now);
    if (now.sa_handler == SIG_IGN) continue;  // as nohup asks
    struct sigaction wanted{};
    wanted.sa_handler = on_signal;
    wanted.sa_flags = SA_RESTART;
    ::sigaction(signal, &wanted, nullptr);
  }
}

gentle_end::gentle_end() { gentle = 1; }
gentle_end::~gentle_end() { gentle = 0; }

void throw_if_interrupted() {
  if (pending) throw interrupted{int(pending)};
}

void run_items(const std::string& what, std::size_t total, const std::function<void(std::size_t)>& run,
               const std::function<void(std::size_t, double)>& report) {
  const gentle_end gentle;
  const auto start = std::chrono::steady_clock::now();
  std::size_t finished = 0;
  std::optional<interrupted> stopped;
  try {
    progress_line progress(what);
    for (; finished < total; ++finished) {
      progress.update(std::int64_t(finished), std::int64_t(total));
      run(finished);
    }
  } catch (const interrupted& signal) {
    stopped = signal;
  }
  if (finished > 0) report(finished, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  if (!stopped) return;
  std::fflush(stdout);
  std::fprintf(stderr, "tessera: interrupted after %zu of %zu %s; %s\n", finished, total, what.c_str(),
               finished > 0 ? "the result counts these alone" : "there is no result");
  throw *stopped;
}

}  // namespace tool
