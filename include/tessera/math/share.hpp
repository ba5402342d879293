// A share of so many tokens, in whole tokens: as its decimals say, not as its binary digits do.
#pragma once

#include <cmath>
#include <concepts>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A share in [0, 1], taken as the decimal that it was written as: 0.55 of 100 tokens are 55, though the double nearest to 0.55
/// lies above it and ceil(0.55 * 100) is 56. Decimals count up to the sixth of a float, up to the ninth of a double. A share above
/// 0 is at least one part, so that `up` of any tokens is at least 1.
/// Shapes   counts of any unit, 0 to 2^62 / 10^9 of them.   Cost  three divisions by a constant.
template <std::floating_point Real>
struct decimal_share {
  static constexpr offset_t whole = sizeof(Real) == sizeof(float) ? 1000000 : 1000000000;

  offset_t parts;  ///< of `whole`

  TESSERA_HD explicit decimal_share(Real share) : parts(offset_t(::round(double(share) * double(whole)))) {
    if (parts == 0 && share > 0) parts = 1;
  }

  TESSERA_HD offset_t down(offset_t count) const { return whole_part(count) + rest(count) / whole; }
  TESSERA_HD offset_t up(offset_t count) const { return whole_part(count) + (rest(count) + whole - 1) / whole; }
  /// Halves go up.
  TESSERA_HD offset_t nearest(offset_t count) const { return whole_part(count) + (rest(count) + whole / 2) / whole; }

 private:
  // Two parts, so that no product leaves 64 bits.
  TESSERA_HD offset_t whole_part(offset_t count) const { return count / whole * parts; }
  TESSERA_HD offset_t rest(offset_t count) const { return count % whole * parts; }
};

TESSERA_NAMESPACE_END
