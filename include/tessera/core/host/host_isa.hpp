// The instruction set that the compiler may use on the host, as a name: TESSERA_HOST_ISA.
#pragma once

// The name is a level, and what a target may have beside it: avx2_v3, avx512fp16_v3_bf16_dot. On x86 it tells apart
// every two values of -march under which compilers choose instructions differently (cmake/checks/two_targets.py goes
// over those of the compiler); -mtune and -O do not count. On other processors it tells apart the levels below.

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

// What x86-64-v3 has beside AVX2: fused products, halves as numbers, bits, counts of zeros, swapped bytes.
#if defined(__FMA__) && defined(__F16C__) && defined(__BMI2__) && defined(__LZCNT__) && defined(__MOVBE__)
#define TESSERA_ISA_USUAL _v3
#else
#define TESSERA_ISA_USUAL
#if defined(__FMA__)
#define TESSERA_ISA_FMA _fma
#endif
#if defined(__F16C__)
#define TESSERA_ISA_HALF _f16c
#endif
#if defined(__BMI2__)
#define TESSERA_ISA_BITS _bmi2
#elif defined(__BMI__)
#define TESSERA_ISA_BITS _bmi
#endif
#if defined(__LZCNT__)
#define TESSERA_ISA_ZEROS _lzcnt
#endif
#if defined(__MOVBE__)
#define TESSERA_ISA_SWAP _movbe
#endif
#endif

#if defined(__FMA4__)
#define TESSERA_ISA_FMA4 _fma4
#endif
#if defined(__POPCNT__) && !defined(__SSE4_2__)
#define TESSERA_ISA_COUNT _popcnt
#endif
#if defined(__TBM__)
#define TESSERA_ISA_TRAILING _tbm
#endif
#if defined(__AVX512BF16__) || defined(__AVXNECONVERT__)
#define TESSERA_ISA_BF16 _bf16
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define TESSERA_ISA_DOT _dot
#endif
#if defined(__XOP__)
#define TESSERA_ISA_VECTOR _xop
#elif defined(__AVX512VBMI__) && !defined(__AVX512VBMI2__)
#define TESSERA_ISA_VECTOR _vbmi
#elif defined(__AVX512ER__)
#define TESSERA_ISA_VECTOR _er
#endif
// With AVX512VBMI2 both of these are usual, and named where they are missing.
#if defined(__AVX512VPOPCNTDQ__) != defined(__AVX512VBMI2__)
#define TESSERA_ISA_VECTOR_COUNT _vpopcnt
#endif
#if defined(__GFNI__) != defined(__AVX512VBMI2__)
#define TESSERA_ISA_GALOIS _gfni
#endif
#if defined(__APX_F__)
#define TESSERA_ISA_WIDER _apx
#endif

// The same words of Arm: halves and bf16 as numbers, products of bytes, atomic instructions.
#if defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define TESSERA_ISA_HALF _fp16
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TESSERA_ISA_BF16 _bf16
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define TESSERA_ISA_DOT _dot
#endif
#if defined(__ARM_FEATURE_ATOMICS)
#define TESSERA_ISA_BITS _lse
#endif

#if !defined(TESSERA_ISA_FMA)
#define TESSERA_ISA_FMA
#endif
#if !defined(TESSERA_ISA_HALF)
#define TESSERA_ISA_HALF
#endif
#if !defined(TESSERA_ISA_BITS)
#define TESSERA_ISA_BITS
#endif
#if !defined(TESSERA_ISA_ZEROS)
#define TESSERA_ISA_ZEROS
#endif
#if !defined(TESSERA_ISA_SWAP)
#define TESSERA_ISA_SWAP
#endif
#if !defined(TESSERA_ISA_FMA4)
#define TESSERA_ISA_FMA4
#endif
#if !defined(TESSERA_ISA_COUNT)
#define TESSERA_ISA_COUNT
#endif
#if !defined(TESSERA_ISA_TRAILING)
#define TESSERA_ISA_TRAILING
#endif
#if !defined(TESSERA_ISA_BF16)
#define TESSERA_ISA_BF16
#endif
#if !defined(TESSERA_ISA_DOT)
#define TESSERA_ISA_DOT
#endif
#if !defined(TESSERA_ISA_VECTOR)
#define TESSERA_ISA_VECTOR
#endif
#if !defined(TESSERA_ISA_VECTOR_COUNT)
#define TESSERA_ISA_VECTOR_COUNT
#endif
#if !defined(TESSERA_ISA_GALOIS)
#define TESSERA_ISA_GALOIS
#endif
#if !defined(TESSERA_ISA_WIDER)
#define TESSERA_ISA_WIDER
#endif

#define TESSERA_ISA_PASTE(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) a##b##c##d##e##f##g##h##i##j##k##l##m##n##o##p
#define TESSERA_ISA_NAME(...) TESSERA_ISA_PASTE(__VA_ARGS__)
#define TESSERA_HOST_ISA                                                                                           \
  TESSERA_ISA_NAME(TESSERA_ISA_LEVEL, TESSERA_ISA_USUAL, TESSERA_ISA_FMA, TESSERA_ISA_HALF, TESSERA_ISA_BITS,      \
                   TESSERA_ISA_ZEROS, TESSERA_ISA_SWAP, TESSERA_ISA_FMA4, TESSERA_ISA_COUNT, TESSERA_ISA_TRAILING, \
                   TESSERA_ISA_BF16, TESSERA_ISA_DOT, TESSERA_ISA_VECTOR, TESSERA_ISA_VECTOR_COUNT,                \
                   TESSERA_ISA_GALOIS, TESSERA_ISA_WIDER)
