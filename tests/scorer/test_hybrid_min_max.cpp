#include "catch.hpp"

#include <tessera/scorer/hybrid_min_max.hpp>

#include "laws/paged_scorers.hpp"

using namespace tessera;

TEST_CASE("hybrid_min_max obeys the laws of paged scorers") {
  support::obeys_the_laws_of_paged_scorers(hybrid_min_max{});
}

TEST_CASE("page and channels follow from the ratio as in the published code") {
  struct row {
    double ratio;
    index_t page, channels;
  };
  // page 1 wherever the root, rounded up, exceeds the ratio itself
  for (const row& r : {row{1, 1, 128}, row{1.6702, 1, 76}, row{2, 2, 128}, row{2.5668, 2, 99}, row{4, 2, 64},
                       row{6.2305, 3, 61}, row{9, 3, 42}, row{1e9, 31623, 1}}) {
    const auto fitted = hybrid_min_max{}.fitted(r.ratio, 128);
    CHECK(fitted.page == r.page);
    CHECK(fitted.channels == r.channels);
  }
  // What is given stays.
  CHECK(hybrid_min_max{5, 0}.fitted(6.2305, 128).page == 5);
  CHECK(hybrid_min_max{5, 0}.fitted(6.2305, 128).channels == 102);
  CHECK(hybrid_min_max{0, 7}.fitted(6.2305, 128).channels == 7);
  CHECK(hybrid_min_max{100, 0}.fitted(2, 128).channels == 128);
}

TEST_CASE("the sign is the group's and the scale makes up for the channels left out") {
  const hybrid_min_max scorer;
  CHECK(scorer.takes_upper(-1, 0.5f));
  CHECK_FALSE(scorer.takes_upper(1, -0.5f));
  CHECK_FALSE(scorer.takes_upper(1, 0));  // the published code's choice
  CHECK(scorer.row_scale(0.125f, 3, 3) == 0.125f);
  CHECK(scorer.row_scale(0.125f, 1, 4) == 0.25f);
  CHECK(scorer.row_scale(0.125f, 0, 4) == 0);
  CHECK(scorer.row_scale(0.125f, 0, 0) == 0);
}

TEST_CASE("hybrid_min_max refuses channels that a key has not") {
  CHECK_THROWS_WITH((hybrid_min_max{-1, 0}).check(64), contains("page is -1; expected 0 to 16777216; it means"));
  CHECK_THROWS_WITH((hybrid_min_max{0, -1}).check(64), contains("channels is -1; expected 0 to 256"));
  CHECK_THROWS_WITH((hybrid_min_max{0, 65}).fitted(1, 64),
                    contains("channels is 65; expected 0 to the head dim, which is 64"));
}

TEST_CASE("the newest page is left to its score, unless newest says otherwise") {
  CHECK(hybrid_min_max{}.protected_tail(64) == 0);
  CHECK(hybrid_min_max{.newest = 1}.fitted(64, 128).protected_tail(64) == 1);
  CHECK(hybrid_min_max{.newest = 40}.protected_tail(8) == 8);
  CHECK_THROWS_WITH(hybrid_min_max{.newest = -1}.check(64), contains("newest is -1; expected 0 to 16777216"));
}
