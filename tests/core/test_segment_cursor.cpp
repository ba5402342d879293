// Segments are numbered alike in any chunks, and none is longer than the limit.
#include "catch.hpp"

#include <vector>

#include <tessera/core/stored/segment_cursor.hpp>

#include "support/random.hpp"

using namespace tessera;

TEST_CASE("a segment ends after a flag, and after 256 tokens without one") {
  segment_cursor text;
  CHECK(text.advance(false) == 0);
  CHECK(text.advance(true) == 0);
  CHECK(text.advance(true) == 1);
  for (index_t t = 0; t < 256; ++t) REQUIRE(text.advance(false) == 2);
  CHECK(text.advance(false) == 3);
  for (index_t t = 1; t < 255; ++t) REQUIRE(text.advance(false) == 3);
  CHECK(text.advance(true) == 3);  // the 256th with a flag ends one segment, not two
  CHECK(text.advance(false) == 4);
}

TEST_CASE("chunks number a text as one piece does") {
  support::rng random(11);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t tokens = random.between(1, 900);
    std::vector<std::uint8_t> flags(static_cast<std::size_t>(tokens));
    const double often = random.pick({0.0, 0.01, 0.3, 1.0});
    for (auto& flag : flags) flag = random.chance(often);
    // Written down by hand: a segment begins behind a flag and where 256 tokens have gone by.
    std::vector<index_t> expected;
    index_t segment = 0, begin = 0;
    for (index_t t = 0; t < tokens; ++t) {
      if (t > 0 && (flags[std::size_t(t - 1)] == 1 || t - begin == 256)) ++segment, begin = t;
      expected.push_back(segment);
    }
    segment_cursor text;
    for (index_t first = 0; first < tokens;) {
      const index_t chunk = random.between(1, tokens - first);
      segment_cursor inside = text;
      for (index_t t = first; t < first + chunk; ++t) {
        REQUIRE(inside.advance(flags[std::size_t(t)] != 0) == expected[std::size_t(t)]);
      }
      text.advance(flags.data() + first, chunk);
      first += chunk;
    }
  }
}

TEST_CASE("boundaries are one flag a token, 0 or 1") {
  const std::vector<std::uint8_t> flags{0, 1, 2};
  CHECK_NOTHROW(require_boundaries({flags.data(), 2}, 2));
  CHECK_THROWS_WITH(require_boundaries({}, 3),
                    contains("boundaries is 0; expected one flag for each new token, which are 3"));
  CHECK_THROWS_WITH(require_boundaries({flags.data(), 2}, 3), contains("boundaries is 2"));
  CHECK_THROWS_WITH(require_boundaries(flags, 3), contains("boundaries[2] is 2; expected 0 or 1"));
}
