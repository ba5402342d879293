// The calling thread's floating-point mode as -ffast-math programs, or the caller's choice of a rounding, leave it.
#pragma once

#include <cfenv>
#include <cfloat>
#include <cstdint>

namespace support {

/// While it lives subnormal numbers count as 0 and results are rounded upwards: on x86 and 64-bit ARM, elsewhere the rounding alone.
class odd_float_mode {
 public:
  odd_float_mode() {
    std::fegetenv(&before_);
    std::fesetround(FE_UPWARD);
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#elif defined(__aarch64__)
    std::uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    asm volatile("msr fpcr, %0" ::"r"(mode | 1 << 24));
#endif
  }
  ~odd_float_mode() {
    std::fesetenv(&before_);
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x8040u);
#endif
  }
  odd_float_mode(const odd_float_mode&) = delete;
  odd_float_mode& operator=(const odd_float_mode&) = delete;

 private:
  std::fenv_t before_;
};

/// Whether the thread keeps subnormal numbers, and rounds to nearest.
inline bool keeps_subnormals() {
  volatile float least = FLT_MIN;
  volatile float half = least / 2;
  volatile float back = half * 2;
  return back == least;
}
inline bool rounds_to_nearest() {
  volatile float one = 1, little = FLT_EPSILON / 4;
  volatile float up = one + little, down = -one - little;
  return up == 1 && down == -1;
}

}  // namespace support
