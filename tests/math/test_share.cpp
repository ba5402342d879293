#include "catch.hpp"

#include <cmath>
#include <limits>

#include <tessera/math/share.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/scorer/value_norm.hpp>
#include <tessera/scorer/weighted_by.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

TEST_CASE("a share is the decimal that was written, whatever its binary digits are") {
  // The products in double are 55.00000000000001, 56.00000000000001 and 700.0000000000001.
  CHECK(std::ceil(0.55 * 100) == 56);
  CHECK(decimal_share(0.55).up(100) == 55);
  CHECK(decimal_share(0.28).up(200) == 56);
  CHECK(decimal_share(0.07).up(10'000) == 700);
  // 0.29 * 100 is 28.999999999999996; 0.7f lies below 0.7, and 0.35 * 90 in double below 31.5.
  CHECK(decimal_share(0.29).down(100) == 29);
  CHECK(decimal_share(0.7f).down(100) == 70);
  CHECK(decimal_share(0.35).nearest(90) == 32);
  CHECK(decimal_share(0.35f).nearest(90) == 32);
}

TEST_CASE("shares of all hundredths and thousandths follow whole numbers") {
  rng random(311);
  for (const index_t whole : {100, 1'000}) {
    for (index_t part = 0; part <= whole; ++part) {
      for (const index_t count : {0, 1, 31, 32, 33, 100, 200, 10'000, random.between(0, 1 << 30)}) {
        const std::int64_t product = std::int64_t(part) * count;
        const auto follows = [&](const auto& share) {
          REQUIRE(share.up(count) == (product + whole - 1) / whole);
          REQUIRE(share.down(count) == product / whole);
          REQUIRE(share.nearest(count) == (2 * product + whole) / (2 * whole));
        };
        follows(decimal_share(double(part) / whole));
        follows(decimal_share(float(part) / float(whole)));
      }
    }
  }
}

TEST_CASE("a share that was divided gives back what was divided") {
  for (index_t tokens = 1; tokens <= 2'000; ++tokens) {
    for (index_t kept = 0; kept <= tokens; ++kept) {
      const auto gives_back = [&](const auto& share) {
        if (share.up(tokens) != kept || share.down(tokens) != kept || share.nearest(tokens) != kept) {
          FAIL(kept << " of " << tokens << ": " << share.up(tokens) << ", " << share.down(tokens) << ", "
                    << share.nearest(tokens));
        }
      };
      gives_back(decimal_share(double(kept) / tokens));
      if (tokens <= 1'000) gives_back(decimal_share(float(kept) / float(tokens)));
    }
  }
  CHECK(decimal_share(1.0f / 3).down(30) == 10);
}

TEST_CASE("shares of any count stay within it, and a share above 0 is at least one") {
  const std::int64_t most = std::numeric_limits<index_t>::max();
  CHECK(decimal_share(1.0).up(most * 256) == most * 256);
  CHECK(decimal_share(1.0f).down(most * 256) == most * 256);
  CHECK(decimal_share(0.999999999).up(1'000'000'000) == 999'999'999);
  CHECK(decimal_share(1e-15).up(5) == 1);
  CHECK(decimal_share(0.0).up(5) == 0);
}

TEST_CASE("what goes by scores alone is a decimal part of what is kept") {
  weighted_by<observation_window, value_norm> scorer;
  scorer.first = 0.7f;
  CHECK(scorer.taken_first(100) == 70);
  CHECK(scorer.taken_first(1) == 1);
}
