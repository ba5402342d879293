// Version, inline namespace and the few macros of Tessera. Every macro begins with TESSERA_.
#pragma once

#include "host/host_isa.hpp"

#if !defined(__cpp_exceptions)
#error "tessera: exceptions are off; expected a compiler that has them on: errors are thrown; leave -fno-exceptions out"
#define TESSERA_STOPS_HERE "tessera stops here"  // no such file: its inclusion ends compilation without more errors
#include TESSERA_STOPS_HERE
#endif

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

// Inline namespaces carry the version, so that two engines in one process can each include their own copy, and the
// instruction set that the compiler may use (host_isa.hpp), so that units built with different target flags can be
// linked into one program and chosen by what the processor has: no function of one is taken for that of another. A
// recipe or a cache that one passes to another is a link error. See docs/decisions/0017-one-namespace-a-target.md.
#define TESSERA_NAMESPACE_BEGIN \
  namespace tessera {           \
  inline namespace v0_1 {       \
  inline namespace TESSERA_HOST_ISA {
#define TESSERA_NAMESPACE_END \
  }                           \
  }                           \
  }

// The types that translation units with different flags share: views, element types, the error. Their code is always
// inlined.
#define TESSERA_SHARED_NAMESPACE_BEGIN \
  namespace tessera {                  \
  inline namespace v0_1 {
#define TESSERA_SHARED_NAMESPACE_END \
  }                                  \
  }

// Marks a function that a policy body may call on the host and on the device.
#if defined(__CUDACC__)
#define TESSERA_HD __host__ __device__
#else
#define TESSERA_HD
#endif

// Inner loops over head_dim or a tile of tokens are short and known: this asks for them to be unrolled and vectorised.
#if defined(__clang__) || defined(__GNUC__)
#define TESSERA_INLINE inline __attribute__((always_inline))
#define TESSERA_RESTRICT __restrict__
#else
#define TESSERA_INLINE inline
#define TESSERA_RESTRICT
#endif

// States a condition that device code relies on. Debug builds trap if it is false; release builds assume it.
#if defined(__CUDA_ARCH__) && !defined(NDEBUG)
#define TESSERA_ASSUME(condition) ((condition) ? (void)0 : __trap())
#elif !defined(__CUDA_ARCH__) && !defined(NDEBUG)
#include <cassert>
#define TESSERA_ASSUME(condition) assert(condition)
#else
#define TESSERA_ASSUME(condition) ((void)0)
#endif
