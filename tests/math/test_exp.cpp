#include "catch.hpp"

#include <cmath>
#include <limits>

#include <tessera/math/exp.hpp>

using namespace tessera;

namespace {
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

double ulps(float got, double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  return std::abs(double(got) - exact) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}
}  // namespace

TEST_CASE("fast_exp is within 2 ulp of exp between -87 and 88") {
  double worst = 0;
  for (int i = -870'000; i <= 880'000; ++i) {
    const float x = float(i) * 1e-4f;
    worst = std::max(worst, ulps(fast_exp(x), std::exp(double(x))));
  }
  CHECK(worst < 2);
}

TEST_CASE("fast_exp never gives a subnormal, and its value falls with its argument at both ends") {
  float before = 1;
  for (float x = -80; x > -110; x -= 0.001f) {
    const float value = fast_exp(x);
    REQUIRE((value == 0 || value >= std::numeric_limits<float>::min()));
    REQUIRE(value <= before);
    before = value;
  }
  before = 1;
  for (float x = 80; x < 95; x += 0.001f) {
    const float value = fast_exp(x);
    REQUIRE(value >= before);
    before = value;
  }
  CHECK(before == infinity);
}

TEST_CASE("fast_exp is exactly 1 at 0, 0 at -infinity, infinite at infinity and NaN for NaN") {
  CHECK(fast_exp(0.0f) == 1.0f);
  CHECK(fast_exp(-0.0f) == 1.0f);
  CHECK(fast_exp(-infinity) == 0.0f);
  CHECK(fast_exp(-88.0f) == 0.0f);
  CHECK(fast_exp(infinity) == infinity);
  CHECK(fast_exp(89.0f) == infinity);
  CHECK(std::isfinite(fast_exp(88.7f)));
  CHECK(std::isnan(fast_exp(not_a_number)));
}
