#include "catch.hpp"

#include <tessera/scorer/page_min_max.hpp>

#include "laws/paged_scorers.hpp"

using namespace tessera;

TEST_CASE("page_min_max obeys the laws of paged scorers") { support::obeys_the_laws_of_paged_scorers(page_min_max{}); }

TEST_CASE("Quest reads all channels, pages of 16 unless the budget decides") {
  CHECK(page_min_max{}.fitted(64, 128).page == 16);
  CHECK(page_min_max{}.fitted(64, 128).channels == 128);
  CHECK(page_min_max{0}.fitted(64, 128).page == 64);
  CHECK(page_min_max{0}.fitted(6.2305, 128).page == 7);
  CHECK(page_min_max{0}.fitted(1, 128).page == 1);
  CHECK_THROWS_WITH(page_min_max{-1}.check(64), contains("page is -1; expected 0 to 16777216"));
}

TEST_CASE("the page of the newest token is read in any case, unless newest is 0") {
  CHECK(page_min_max{}.protected_tail(64) == 1);
  CHECK(page_min_max{}.fitted(64, 128).protected_tail(64) == 1);
  CHECK(page_min_max{.newest = 0}.fitted(64, 128).protected_tail(64) == 0);
  CHECK(page_min_max{.newest = 40}.protected_tail(8) == 8);
  CHECK_THROWS_WITH(page_min_max{.newest = -1}.check(64), contains("newest is -1; expected 0 to 16777216"));
}

TEST_CASE("each query takes the side of its own sign: the larger of both products") {
  const page_min_max scorer;
  for (const float q : {-2.0f, -0.5f, 0.0f, 1.0f, 3.0f}) {
    const float low = -1.5f, high = 0.75f;
    CHECK(q * (scorer.takes_upper(q, -q) ? high : low) == std::max(q * low, q * high));
  }
  CHECK(scorer.row_scale(0.125f, 1, 4) == 1);
}
