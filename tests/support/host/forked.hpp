// Calls in a child of fork().
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <exception>

namespace support {

#if defined(__SANITIZE_THREAD__)
#define TESSERA_TEST_UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TESSERA_TEST_UNDER_TSAN 1
#endif
#endif
/// The thread sanitizer ends a child that starts one, where its parent had threads.
#ifdef TESSERA_TEST_UNDER_TSAN
inline constexpr bool children_may_start_threads = false;
#else
inline constexpr bool children_may_start_threads = true;
#endif

/// What `body` returns in a child of this process, 99 where it throws, minus a signal's number where one ends the child: a
/// child that hangs is ended.
template <class Body>
int in_a_child(const Body& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    int code = 99;
    try {
      code = body();
    } catch (const std::exception&) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace support
