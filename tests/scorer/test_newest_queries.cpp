#include "catch.hpp"

#include <tessera/core/error.hpp>
#include <tessera/scorer/newest_queries.hpp>
#include <tessera/scorer/observation_window.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("newest_queries obeys the laws of scorers") { support::obeys_the_laws_of_scorers(newest_queries{}); }

TEST_CASE("newest_queries follows a conversation into its answers, and keeps what it observes") {
  CHECK(following_scorer<newest_queries>);
  CHECK_FALSE(following_scorer<observation_window>);
  CHECK(newest_queries{}.protected_tail(1000) == 16);
  CHECK(newest_queries{.window = 3}.protected_tail(1000) == 3);
}

TEST_CASE("newest_queries refuses to observe none, or more than the budget") {
  CHECK_NOTHROW(newest_queries{}.check(16));
  CHECK_THROWS_WITH(newest_queries{}.check(15), contains("observed is 16; expected at most the budget, which is 15"));
  CHECK_THROWS_WITH((newest_queries{.window = 1, .pool = 4}.check(15)), contains("pool is 4; expected an odd number"));
  CHECK_THROWS_WITH(newest_queries{.window = 0}.check(15), contains("observed is 0; expected 1"));
}
