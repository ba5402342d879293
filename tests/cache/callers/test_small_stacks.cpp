// Threads with small stacks call caches: fibres have 64 KiB, threads of musl 128.
#include "catch.hpp"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <exception>

#include <tessera/methods/expected_attention.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/lagkv.hpp>

#include "cache/callers/talk.hpp"

using namespace callers_test;

namespace {

// What a debug build spills, and a sanitizer lays around variables, says nothing of a program that is used.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr bool counts = true;
#else
constexpr bool counts = false;
#endif

struct call {
  void (*made)(void*);
  void* with;
  std::exception_ptr failure;
};

/// Bytes of its stack that a thread has written to when it has made a call, those that it begins with included.
template <class Body>
std::size_t stack_used(Body body) {
  constexpr std::size_t size = 4 << 20;
  constexpr unsigned char untouched = 0xab;
  auto* stack = static_cast<unsigned char*>(std::aligned_alloc(4096, size));
  std::memset(stack, untouched, size);
  call one{[](void* with) { (*static_cast<Body*>(with))(); }, &body, nullptr};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  REQUIRE(pthread_attr_setstack(&attributes, stack, size) == 0);
  pthread_t thread;
  const auto go = [](void* given) -> void* {
    call& own = *static_cast<call*>(given);
    try {
      own.made(own.with);
    } catch (...) {
      own.failure = std::current_exception();
    }
    return nullptr;
  };
  REQUIRE(pthread_create(&thread, &attributes, go, &one) == 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  std::size_t free = 0;
  while (free < size && stack[free] == untouched) ++free;
  std::free(stack);
  if (one.failure) std::rethrow_exception(one.failure);
  return size - free;
}

template <class Method>
void needs_little_stack() {
  const talk<Method> of(300, 4);
  const std::size_t used = stack_used([&] {
    auto kv = of.made(std::make_shared<cpu::executor>(1));
    of.held(kv);
  });
  if (counts) {
    CHECK(used <= 48 * 1024);
  } else {
    WARN("a stack of " << used << " bytes, in a build that is not optimised");
  }
}

}  // namespace

TEST_CASE("a thread whose stack has 48 KiB may call a cache of any head dim") {
  needs_little_stack<h2o<bf16, 256>>();
  needs_little_stack<lagkv<bf16, 256>>();
  needs_little_stack<expected_attention<fp16, 256>>();
}
