#include "catch.hpp"

#include <tessera/selector/top_pages.hpp>

#include "laws/policies.hpp"
#include "support/page_oracle.hpp"

using namespace tessera;
using support::chosen;
using list = std::vector<index_t>;

TEST_CASE("whole pages, as many as the tokens need, ties to the lower page") {
  const std::vector<float> scores{1, 1, 5, 5, 3, 3, 5, 5, 9};
  CHECK(chosen(top_pages{2}, scores, 0, 1) == list{8});  // the short last page counts its real token
  CHECK(chosen(top_pages{2}, scores, 0, 3) == list{2, 3, 8});
  CHECK(chosen(top_pages{2}, scores, 0, 6) == list{2, 3, 6, 7, 8});
  CHECK(chosen(top_pages{2}, scores, 0, 100) == list{0, 1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(chosen(top_pages{2}, scores, 0, 0).empty());
  CHECK(chosen(top_pages{100}, scores, 0, 1) == list{0, 1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(chosen(top_pages{2}, {}, 0, 3).empty());
}

TEST_CASE("pages of the newest slots come first, even where there are more of them") {
  const std::vector<float> scores{9, 9, 1, 1, 1, 1, 1};
  CHECK(chosen(top_pages{2}, scores, 1, 2) == list{6});
  CHECK(chosen(top_pages{2}, scores, 2, 2) == list{4, 5, 6});
  CHECK(chosen(top_pages{2}, scores, 2, 6) == list{0, 1, 4, 5, 6});
}

TEST_CASE("pages are those of the oracle, for any scores") {
  support::rng random(231);
  for (index_t i = 0; i < support::scaled(10'000); ++i) {
    const index_t n = random.pick({0, 1, 31, 32, 33, random.between(0, 90)}), page = random.pick({1, 2, 3, 16, 40});
    auto scores = support::tied_scores(random, n, random.pick({1, 3, 30}));
    for (auto& score : scores)
      score = random.chance(0.1) ? random.pick({support::not_a_number, -infinity, infinity}) : score;
    const index_t keep = random.between(-1, n + 2), tail = random.between(0, n);
    CAPTURE(n, page, keep, tail);
    REQUIRE(chosen(top_pages{page}, scores, tail, keep) == support::oracle::top_pages(scores, tail, keep, page));
  }
}
