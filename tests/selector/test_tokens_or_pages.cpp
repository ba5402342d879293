#include "catch.hpp"

#include <tessera/selector/tokens_or_pages.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("tokens_or_pages chooses as its parameter says") {
  support::obeys_the_laws_of_selectors(tokens_or_pages{});
  support::rng random(232);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    const index_t n = random.between(0, 70), page = random.between(1, 9), keep = random.between(0, n + 2);
    const index_t tail = random.between(0, 5);
    const auto scores = support::tied_scores(random, n, 5);
    REQUIRE(support::chosen(tokens_or_pages{selection_unit::token, page}, scores, tail, keep) ==
            support::chosen(top_tokens{}, scores, tail, keep));
    REQUIRE(support::chosen(tokens_or_pages{selection_unit::page, page}, scores, tail, keep) ==
            support::chosen(top_pages{page}, scores, tail, keep));
  }
}
