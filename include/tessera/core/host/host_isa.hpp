// The instruction set that the compiler may use on the host, as a name: TESSERA_HOST_ISA.
#pragma once

// The name is a level, and what a target may have beside it: avx2_fma_f16c_bmi2_lzcnt_movbe. On x86 it tells apart every two
// values of -march under which compilers choose instructions differently (tests/link/two_targets.py goes over those of the
// compiler); -mtune and -O do not count. On other processors it tells apart the levels below.

#if defined(__x86_64__) || defined(__i386__) || defined(_M_X64)
#if defined(__AVX512FP16__)
#define TESSERA_ISA_LEVEL avx512fp16
#elif defined(__AVX512VBMI2__)
#define TESSERA_ISA_LEVEL avx512vbmi2
#elif defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define TESSERA_ISA_LEVEL avx512vl
#elif defined(__AVX512F__)
#define TESSERA_ISA_LEVEL avx512
#elif defined(__AVX2__)
#define TESSERA_ISA_LEVEL avx2
#elif defined(__AVX__)
#define TESSERA_ISA_LEVEL avx
#elif defined(__SSE4_2__)
#define TESSERA_ISA_LEVEL sse4_2
#elif defined(__SSE4_1__)
#define TESSERA_ISA_LEVEL sse4_1
#elif defined(__SSSE3__)
#define TESSERA_ISA_LEVEL ssse3
#elif defined(__SSE4A__)
#define TESSERA_ISA_LEVEL sse4a
#elif defined(__SSE3__)
#define TESSERA_ISA_LEVEL sse3
#else
#define TESSERA_ISA_LEVEL baseline
#endif
#elif defined(__ARM_FEATURE_SVE2)
#define TESSERA_ISA_LEVEL sve2
#elif defined(__ARM_FEATURE_SVE)
#define TESSERA_ISA_LEVEL sve
#elif defined(__riscv_vector)
#define TESSERA_ISA_LEVEL rvv
#elif defined(__POWER10_VECTOR__)
#define TESSERA_ISA_LEVEL power10
#elif defined(__POWER9_VECTOR__)
#define TESSERA_ISA_LEVEL power9
#else
#define TESSERA_ISA_LEVEL baseline
#endif

#if defined(__FMA4__) && defined(__FMA__)
#define TESSERA_ISA_FMA _fma4_fma
#elif defined(__FMA4__)
#define TESSERA_ISA_FMA _fma4
#elif defined(__FMA__)
#define TESSERA_ISA_FMA _fma
#else
#define TESSERA_ISA_FMA
#endif

// Halves as numbers: converted (x86), or computed with (Arm).
#if defined(__F16C__)
#define TESSERA_ISA_HALF _f16c
#elif defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define TESSERA_ISA_HALF _fp16
#else
#define TESSERA_ISA_HALF
#endif

#if defined(__AVX512BF16__) || defined(__AVXNECONVERT__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TESSERA_ISA_BF16 _bf16
#else
#define TESSERA_ISA_BF16
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define TESSERA_ISA_DOT _dot
#else
#define TESSERA_ISA_DOT
#endif

// Instructions for bits and integers (x86) and atomic ones (Arm), which compilers use anywhere.
#if defined(__BMI2__)
#define TESSERA_ISA_SCALAR _bmi2
#elif defined(__BMI__)
#define TESSERA_ISA_SCALAR _bmi
#elif defined(__ARM_FEATURE_ATOMICS)
#define TESSERA_ISA_SCALAR _lse
#else
#define TESSERA_ISA_SCALAR
#endif

#if defined(__POPCNT__) && !defined(__SSE4_2__)
#define TESSERA_ISA_COUNT _popcnt
#else
#define TESSERA_ISA_COUNT
#endif
#if defined(__LZCNT__)
#define TESSERA_ISA_ZEROS _lzcnt
#else
#define TESSERA_ISA_ZEROS
#endif
#if defined(__MOVBE__)
#define TESSERA_ISA_SWAP _movbe
#else
#define TESSERA_ISA_SWAP
#endif
#if defined(__TBM__)
#define TESSERA_ISA_MORE_SCALAR _tbm
#else
#define TESSERA_ISA_MORE_SCALAR
#endif

// Instructions for vectors beside the level's.
#if defined(__XOP__)
#define TESSERA_ISA_MORE_VECTOR _xop
#elif defined(__AVX512VBMI__) && !defined(__AVX512VBMI2__)
#define TESSERA_ISA_MORE_VECTOR _vbmi
#elif defined(__AVX512ER__)
#define TESSERA_ISA_MORE_VECTOR _er
#else
#define TESSERA_ISA_MORE_VECTOR
#endif
#if defined(__AVX512VPOPCNTDQ__)
#define TESSERA_ISA_VECTOR_COUNT _vpopcnt
#else
#define TESSERA_ISA_VECTOR_COUNT
#endif
#if defined(__GFNI__)
#define TESSERA_ISA_GALOIS _gfni
#else
#define TESSERA_ISA_GALOIS
#endif

#if defined(__APX_F__)
#define TESSERA_ISA_WIDER _apx
#else
#define TESSERA_ISA_WIDER
#endif

#define TESSERA_ISA_PASTE(level, fma, half, bf16, dot, scalar, count, zeros, swap, more, vector, vcount, galois, wider) \
  level##fma##half##bf16##dot##scalar##count##zeros##swap##more##vector##vcount##galois##wider
#define TESSERA_ISA_NAME(...) TESSERA_ISA_PASTE(__VA_ARGS__)
#define TESSERA_HOST_ISA                                                                                          \
  TESSERA_ISA_NAME(TESSERA_ISA_LEVEL, TESSERA_ISA_FMA, TESSERA_ISA_HALF, TESSERA_ISA_BF16, TESSERA_ISA_DOT,       \
                   TESSERA_ISA_SCALAR, TESSERA_ISA_COUNT, TESSERA_ISA_ZEROS, TESSERA_ISA_SWAP, TESSERA_ISA_MORE_SCALAR, \
                   TESSERA_ISA_MORE_VECTOR, TESSERA_ISA_VECTOR_COUNT, TESSERA_ISA_GALOIS, TESSERA_ISA_WIDER)
