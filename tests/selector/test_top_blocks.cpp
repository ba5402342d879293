#include "catch.hpp"

#include <tessera/selector/top_blocks.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {
std::vector<index_t> chosen(const std::vector<float>& scores, index_t tail, index_t keep, index_t block) {
  std::vector<index_t> out(scores.size());
  top_k_scratch scratch;
  const top_blocks policy{.block = block};
  out.resize(std::size_t(policy.select(scores.data(), index_t(scores.size()), tail, keep, out.data(), scratch)));
  return out;
}
}  // namespace

TEST_CASE("top_blocks chooses what its definition says, ties, short last blocks and specials included") {
  support::rng random(72);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t n = random.between(0, 120), tail = random.between(-1, n + 2), keep = random.between(-1, n + 2);
    const index_t block = random.pick({1, 2, 3, 7, 16, 64, 200});
    // Multiples of 1/4: block sums are exact, so ties between blocks are too.
    auto scores = support::tied_scores(random, n, random.pick({1, 2, 6, 60}));
    for (auto& score : scores) score = random.chance(0.05) ? random.pick({std::nanf(""), infinity, -infinity}) : score;
    REQUIRE(chosen(scores, tail, keep, block) == support::oracle::top_blocks(scores, tail, keep, block));
  }
}

TEST_CASE("top_blocks by hand: whole blocks first, the last one trimmed to its best tokens") {
  const std::vector<float> scores{1, 1, 1, 1, /**/ 0, 9, 0, 8, /**/ 3, 3, 3, 3, /**/ 7, 0, /*tail*/ 0, 0};
  CHECK(chosen(scores, 2, 6, 4) == std::vector<index_t>{4, 5, 6, 7, 14, 15});
  CHECK(chosen(scores, 2, 8, 4) == std::vector<index_t>{4, 5, 6, 7, 8, 9, 14, 15});
  CHECK(chosen(scores, 2, 5, 4) == std::vector<index_t>{4, 5, 7, 14, 15});
  // The short block 12..13 comes third: it fits whole, and one token of the fourth beside it.
  CHECK(chosen(scores, 2, 13, 4) == std::vector<index_t>{0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
}

TEST_CASE("top_blocks ranks a block of nothing but NaN last, and counts NaN as 0 beside numbers") {
  const float nan = std::nanf("");
  CHECK(chosen({nan, nan, -5, -5}, 0, 2, 2) == std::vector<index_t>{2, 3});
  CHECK(chosen({nan, 3, 1, 1}, 0, 2, 2) == std::vector<index_t>{0, 1});
  CHECK(chosen({5, 5, -infinity, infinity}, 0, 2, 2) == std::vector<index_t>{2, 3});
}

TEST_CASE("top_blocks of one token are top_tokens, and a block below 1 is refused") {
  CHECK(chosen({1, 5, 5, 2}, 0, 2, 1) == std::vector<index_t>{1, 2});
  CHECK_THROWS_WITH(top_blocks{.block = 0}.check(), contains("block is 0; expected 1 to 16777216"));
}

TEST_CASE("top_blocks obeys the laws of selectors") {
  for (const index_t block : {1, 4, 16, 100}) support::obeys_the_laws_of_selectors(top_blocks{.block = block});
}
