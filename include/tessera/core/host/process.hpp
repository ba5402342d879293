// Which process this is: a child of fork() has its parent's memory, but none of its threads.
#pragma once

#include "../config.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

TESSERA_NAMESPACE_BEGIN

/// Another number in a child of fork(); 0 where a system has no fork().
inline long process_id() noexcept {
#if defined(__unix__) || defined(__APPLE__)
  return long(::getpid());
#else
  return 0;
#endif
}

TESSERA_NAMESPACE_END
