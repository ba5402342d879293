// How far a result may be from its oracle, and how two results are compared bit by bit.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

namespace support {

/// Largest difference of a row, relative to the row's largest reference entry; infinite where only one is NaN.
template <class Reference>
double row_error(const float* got, const std::vector<Reference>& reference) {
  double top = 1e-6, worst = 0;
  for (const auto x : reference) top = std::max(top, std::isnan(x) ? 0.0 : std::abs(double(x)));
  for (std::size_t d = 0; d < reference.size(); ++d) {
    if (std::isnan(got[d]) != std::isnan(reference[d])) return HUGE_VAL;
    if (!std::isnan(got[d])) worst = std::max(worst, std::abs(double(got[d]) - double(reference[d])));
  }
  return worst / top;
}

/// Difference of two numbers relative to the reference, or absolute below 1; 0 for equal infinities and for two NaN.
inline double number_error(double got, double reference) {
  if (got == reference || (std::isnan(got) && std::isnan(reference))) return 0;
  const double error = std::abs(got - reference) / std::max(1.0, std::abs(reference));
  return std::isnan(error) ? HUGE_VAL : error;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

}  // namespace support
