#include "catch.hpp"

#include <limits>

#include <tessera/scorer/position.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("position ranks sinks above all and newer tokens above older ones") {
  const position policy{.sinks = 2};
  CHECK(policy.score(0, 9) == infinity);
  CHECK(policy.score(1, 9) == infinity);
  for (index_t at = 2; at < 100; ++at) REQUIRE(policy.score(at + 1, 200) > policy.score(at, 200));
  CHECK(position{.sinks = 0}.score(0, 9) == -9);
}

TEST_CASE("position tells every one of the newest 2^24 tokens from the next, however long the text") {
  const position policy{};
  for (const index_t next : {1 << 24, 1 << 30, std::numeric_limits<index_t>::max()}) {
    for (index_t behind = 1; behind < 1'000; ++behind)
      REQUIRE(policy.score(next - behind, next) > policy.score(next - behind - 1, next));
    const index_t oldest = next - (1 << 24) + policy.sinks;
    CHECK(policy.score(oldest + 1, next) > policy.score(oldest, next));
  }
}

TEST_CASE("position refuses sinks that leave no room for recent tokens") {
  CHECK_THROWS_WITH(position{.sinks = 4}.check(4),
                    contains("sinks is 4; expected at most one less than the budget, which is 4"));
  CHECK_THROWS_AS(position{.sinks = -1}.check(4), error);
  CHECK_NOTHROW(position{.sinks = 3}.check(4));
}

TEST_CASE("position obeys the laws of scorers") { support::obeys_the_laws_of_scorers(position{}); }
