// Which process this is: a child of fork() has its parent's memory, but none of its threads.
#pragma once

#include <atomic>

#include "../config.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

TESSERA_NAMESPACE_BEGIN

/// Counts the forks of the process from its first call on: a child has one more than its parent. Not counted are
/// children without handlers of pthread_atfork (`_Fork`, clone). Always 0 where a system has no fork(). Shared
/// libraries, and builds for other instruction sets, may each have a counter of their own.
inline const std::atomic<long>& fork_counter() noexcept {
  static std::atomic<long> forks{0};
#if defined(__unix__) || defined(__APPLE__)
  [[maybe_unused]] static const int watches = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
#endif
  return forks;
}

/// The process in which this was made. Code of another shared library asks the counter that counted then.
/// Cost     two loads (1 ns); getpid() instead took 160 ns, 7 % of a round of the executor with its syscall (2-core
///          EPYC VM).
class home_process {
 public:
  home_process() noexcept : forks_(&fork_counter()), made_(forks_->load(std::memory_order_relaxed)) {}
  /// Whether this is that process, and no child of it.
  bool is_here() const noexcept { return forks_->load(std::memory_order_relaxed) == made_; }

 private:
  const std::atomic<long>* forks_;
  long made_;
};

TESSERA_NAMESPACE_END
