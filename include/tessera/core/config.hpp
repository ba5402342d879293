// Version, inline namespace and the few macros of Tessera. Every macro begins with TESSERA_.
#pragma once

#define TESSERA_VERSION_MAJOR 0
#define TESSERA_VERSION_MINOR 1
#define TESSERA_VERSION_PATCH 0

// The inline namespace carries the version, so that two engines in one process can each include their own copy.
#define TESSERA_NAMESPACE_BEGIN \
  namespace tessera {           \
  inline namespace v0_1 {
#define TESSERA_NAMESPACE_END \
  }                           \
  }

// Code for the host's vector units differs with the compiler's target flags, so its inline namespace names the target:
// translation units built with different flags can be linked together.
#if defined(__AVX512F__)
#define TESSERA_HOST_ISA avx512
#elif defined(__AVX__) && defined(__FMA__)
#define TESSERA_HOST_ISA avx_fma
#elif defined(__AVX__)
#define TESSERA_HOST_ISA avx
#else
#define TESSERA_HOST_ISA baseline
#endif

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

// States what device code relies on: debug builds trap, release builds believe it.
#if defined(__CUDA_ARCH__) && !defined(NDEBUG)
#define TESSERA_ASSUME(condition) ((condition) ? (void)0 : __trap())
#elif !defined(__CUDA_ARCH__) && !defined(NDEBUG)
#include <cassert>
#define TESSERA_ASSUME(condition) assert(condition)
#else
#define TESSERA_ASSUME(condition) ((void)0)
#endif
