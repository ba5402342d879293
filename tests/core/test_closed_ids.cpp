#include "catch.hpp"

#include <set>

#include <tessera/core/closed_ids.hpp>

#include "support/random.hpp"

using namespace tessera;

TEST_CASE("the lowest closed id is opened first, in a copy too") {
  support::rng random(88);
  closed_ids closed;
  std::set<index_t> expected;
  std::vector<index_t> open;
  index_t made = 0;
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    REQUIRE(closed.empty() == expected.empty());
    if (random.chance(0.1)) closed = closed_ids(closed);
    if (!open.empty() && random.chance(0.5)) {
      const auto at = open.begin() + random.between(0, index_t(open.size()) - 1);
      closed.add(*at);
      expected.insert(*at);
      open.erase(at);
    } else if (expected.empty()) {
      open.push_back(made++);
      closed.reserve(std::size_t(made));
    } else {
      REQUIRE(closed.lowest() == *expected.begin());
      open.push_back(closed.lowest());
      closed.pop_lowest();
      expected.erase(expected.begin());
    }
  }
}
