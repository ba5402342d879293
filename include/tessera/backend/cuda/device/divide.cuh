// Quotients of small whole numbers without the twenty instructions of a division.
#pragma once

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// floor(a / b) for 0 <= a < 2^20 and b > 0: with half added, the quotient is at least 1 / (2b) away from a whole
/// number, and the product is off by less.
__device__ __forceinline__ index_t small_quotient(index_t a, index_t b) {
  return index_t((float(a) + 0.5f) * __fdividef(1.0f, float(b)));
}

/// floor(x / by) for 0 <= x < 2^31 and by >= 1, by a product that the host prepares.
struct quick_divisor {
  std::uint32_t factor = 1;  // ceil(2^(31 + log) / by), log = ceil(log2(by))
  int shift = 0;
  quick_divisor() = default;
  explicit quick_divisor(index_t by) {
    int log = 0;
    while ((std::int64_t(1) << log) < by) ++log;
    shift = 31 + log;
    factor = std::uint32_t(((std::uint64_t(1) << shift) + std::uint64_t(by) - 1) / std::uint64_t(by));
  }
  __device__ index_t quotient(index_t x) const { return index_t((std::uint64_t(x) * factor) >> shift); }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
