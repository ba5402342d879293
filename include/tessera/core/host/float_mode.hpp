// The floating-point mode of a thread: rounding, subnormals, traps.
#pragma once

#include <cstdint>

#include "../config.hpp"

TESSERA_NAMESPACE_BEGIN

/// While it lives, the calling thread calculates in the mode that programs begin with: it rounds to nearest, keeps
/// subnormal numbers and traps nothing. Its destructor restores the thread's mode. So results do not depend on what a
/// process has set (flush-to-zero of -ffast-math, another rounding), nor on which thread calculates.
/// On x86 with SSE and on 64-bit ARM; elsewhere nothing happens. It is for calls that read and write memory: a compiler
/// may move calculations between registers over it, and clang does.
/// Cost     one read of the register (2 ns, EPYC); two more writes if the mode differs.
class default_float_mode {
 public:
  default_float_mode() noexcept : previous_(read()) {
    if (is_other()) write(initial);
  }
  ~default_float_mode() {
    if (is_other()) write(previous_);
  }
  default_float_mode(const default_float_mode&) = delete;
  default_float_mode& operator=(const default_float_mode&) = delete;

 private:
  bool is_other() const noexcept { return (previous_ & controls) != initial; }

#if defined(__SSE__) && defined(__GNUC__)
  using word = std::uint32_t;
  static constexpr word initial = 0x1f80, controls = 0xffc0;  // the other bits say what has happened
  static word read() noexcept { return __builtin_ia32_stmxcsr(); }
  static void write(word mode) noexcept { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__) && defined(__GNUC__)
  using word = std::uint64_t;
  static constexpr word initial = 0, controls = ~word(0);
  static word read() noexcept {
    word mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
  }
  static void write(word mode) noexcept { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
  using word = int;
  static constexpr word initial = 0, controls = 0;
  static word read() noexcept { return initial; }
  static void write(word) noexcept {}
#endif

  word previous_;
};

TESSERA_NAMESPACE_END
