// A share of a token count, in whole tokens. The share is the decimal number that was written, not the nearest double.
#pragma once

#include <cmath>
#include <concepts>

#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A share in [0, 1], taken as the number that it was written as, not as the nearest binary one. The decimal 0.55 of
/// 100 tokens are 55, though the double nearest to 0.55 lies above it and ceil(0.55 * 100) is 56. A double that is the
/// nearest one to a number of at most nine decimals, or a float to one of six, means that number. Any other share, such
/// as kept / tokens, means a number within its rounding: 2.0 / 3 of 3 tokens are 2. A float of more than three decimals
/// may mean either, and is taken for the one that gives a whole number of tokens. `up` of a share above 0 is at least 1
/// of any tokens.
/// Shapes   counts of any unit, 0 to 2^62 / 10^9 of them.   Cost  three divisions by a constant, or three products.
template <std::floating_point Real>
struct decimal_share {
  static constexpr offset_t whole = sizeof(Real) == sizeof(float) ? 1000000 : 1000000000;

  offset_t parts;  ///< of `whole`: the nearest number of them

  TESSERA_HD explicit decimal_share(Real share)
      : parts(offset_t(::round(double(share) * double(whole)))),
        share_(double(share)),
        is_decimal_(Real(double(parts) / double(whole)) == share) {}

  TESSERA_HD offset_t down(offset_t count) const {
    if (!is_decimal_) return offset_t(::floor(product(count) * (1 + rounding)));
    return whole_part(count) + (rest(count) + slack(count)) / whole;
  }
  TESSERA_HD offset_t up(offset_t count) const {
    if (!is_decimal_) return offset_t(::ceil(product(count) * (1 - rounding)));
    return whole_part(count) + (rest(count) - slack(count) + whole - 1) / whole;
  }
  /// Halves go up.
  TESSERA_HD offset_t nearest(offset_t count) const {
    if (!is_decimal_) return offset_t(::floor(product(count) * (1 + rounding) + 0.5));
    return whole_part(count) + (rest(count) + slack(count) + whole / 2) / whole;
  }

 private:
  /// More than the rounding of a share and of its product.
  static constexpr double rounding = sizeof(Real) == sizeof(float) ? 1.0 / (1 << 23) : 1.0 / (offset_t(1) << 51);

  TESSERA_HD double product(offset_t count) const { return share_ * double(count); }
  // Two parts, so that no product leaves 64 bits.
  TESSERA_HD offset_t whole_part(offset_t count) const { return count / whole * parts; }
  TESSERA_HD offset_t rest(offset_t count) const { return count % whole * parts; }

  /// Parts that the rounding of a float comes to; below a thousandth, so that thousandths of any count are exact.
  TESSERA_HD static offset_t slack(offset_t count) {
    return sizeof(Real) != sizeof(float) ? 0 : (count < 16000 ? count * whole >> 24 : 999);
  }

  double share_;
  bool is_decimal_;
};

TESSERA_NAMESPACE_END
