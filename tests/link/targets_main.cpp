// Takes the build of targets.cpp that the processor can run, and, with an argument, the one for every processor.
#include <cmath>
#include <cstdio>
#include <tessera/core/error.hpp>
#include <vector>

#include "targets.hpp"

int main(int arguments, char**) {
  std::vector<float> values;
  std::uint32_t bits = 1;
  for (int i = 0; i < 300 * 4 * 64; ++i) {
    bits = bits * 1664525u + 1013904223u;
    values.push_back(float(bits >> 8) / float(1 << 24) - 0.5f);
  }
  const auto rows = tessera::nhd_rows<const float>(values.data(), 300, 4, 64);
  const double plain = run_for_any(rows, 1);
  bool right = std::isfinite(plain) && run_for_any(rows, 3) == plain;
  if (arguments == 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    right = right && std::fabs(run_for_avx2(rows, 1) - plain) < 1e-3 * std::fabs(plain);
  try {
    run_for_any(tessera::nhd_rows<const float>(values.data(), 4, 4, 64), 1);
    right = false;
  } catch (const tessera::error& problem) {
    std::printf("%s\n", problem.what());
  }
  return right ? 0 : 1;
}
