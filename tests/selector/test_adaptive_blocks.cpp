// The largest blocks that keep enough of a segment's score: the published example, random segments against the definition.
#include "catch.hpp"

#include <limits>
#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/selector/adaptive_blocks.hpp>

#include "selector/segment_oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;
using support::rng;
using support::scaled;
namespace oracle = support::oracle;

namespace {

struct taken {
  std::vector<index_t> places;
  index_t size;
};

taken choose(const adaptive_blocks& policy, const std::vector<float>& scores, index_t keep) {
  std::vector<index_t> out(scores.size() + 1, -7);
  const index_t size = policy.choose_in_segment(scores.data(), index_t(scores.size()), keep, out.data());
  REQUIRE(out[std::size_t(keep)] == -7);
  out.resize(std::size_t(keep));
  return {out, size};
}

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

}  // namespace

TEST_CASE("blocks of three keep 11 of 18 where nine tenths are asked: single tokens are taken") {
  const std::vector<float> scores{9, 1, 1, 8, 1, 1, 1};
  const auto strict = choose({.coverage = 0.9f}, scores, 3), loose = choose({.coverage = 0.6f}, scores, 3);
  CHECK(strict.places == std::vector<index_t>{0, 1, 3});
  CHECK(strict.size == 1);
  CHECK(loose.places == std::vector<index_t>{0, 1, 2});
  CHECK(loose.size == 3);
}

TEST_CASE("a block larger than its segment or than its count is no candidate, and a whole segment needs no search") {
  CHECK(choose({.coverage = 0}, {1, 2, 3, 4}, 3).size == 3);
  CHECK(choose({.coverage = 0}, {1, 2, 3, 4}, 2).size == 1);
  CHECK(choose({.coverage = 0, .largest = 4}, {1, 2, 3, 4, 5}, 4).size == 4);
  CHECK(choose({.coverage = 0, .largest = 10}, std::vector<float>(12, 1.0f), 9).size == 9);
  const auto whole = choose({.coverage = 1}, {not_a_number, 2, 3, 4, 5, 6}, 6);
  CHECK(whole.places == std::vector<index_t>{0, 1, 2, 3, 4, 5});
  CHECK(whole.size == 5);
  CHECK(choose({}, {7}, 1).size == 1);
}

TEST_CASE("the last block taken gives up its worst tokens, and a short last block competes by its sum") {
  // Blocks of 3: sums 6, 9, 7; the short one has 7. Five tokens: the second block, then two of the last.
  const auto made = choose({.coverage = 0, .largest = 3}, {2, 2, 2, 1, 5, 3, 3, 4}, 5);
  CHECK(made.places == std::vector<index_t>{3, 4, 5, 6, 7});
  const auto cut = choose({.coverage = 0, .largest = 3}, {2, 2, 2, 1, 5, 3, 3, 4}, 4);
  CHECK(cut.places == std::vector<index_t>{3, 4, 5, 7});
}

TEST_CASE("random segments are cut as the definition has it, exactly as many tokens and never below the coverage") {
  rng random(5101);
  for (index_t i = 0; i < scaled(10'000); ++i) {
    const index_t n = random.chance(0.1) ? random.pick({255, 256}) : random.between(1, 40), keep = random.between(1, n);
    auto scores = random.chance(0.5) ? support::tied_scores(random, n, random.pick({1, 3, 30}))
                                     : support::normals(random, std::size_t(n));
    for (float& score : scores) {
      score = random.chance(0.02) ? random.pick({not_a_number, -infinity}) : std::abs(score);
    }
    const adaptive_blocks policy{random.pick({0.0f, 0.5f, 0.9f, 1.0f}), random.pick({1, 2, 3, 7, 9, 10, 256})};
    CAPTURE(i, n, keep, policy.coverage, policy.largest);
    const auto got = choose(policy, scores, keep);
    const std::vector<double> exact(scores.begin(), scores.end());
    const auto expected = oracle::choose_in_segment(exact, keep, double(policy.coverage), policy.largest);
    REQUIRE(got.size == expected.size);
    REQUIRE(got.places == expected.places);
    const double best = oracle::sum_of(exact, oracle::top_k(exact, keep));
    REQUIRE(oracle::sum_of(exact, got.places) >= double(policy.coverage) * best * (1 - 1e-12));
  }
}

TEST_CASE("coverage and sizes out of range are refused") {
  CHECK_NOTHROW(adaptive_blocks{}.check());
  CHECK_THROWS_WITH((adaptive_blocks{.coverage = 1.5f}.check()), contains("coverage is 1.5; expected 0 to 1"));
  CHECK_THROWS_WITH((adaptive_blocks{.coverage = not_a_number}.check()), contains("coverage is nan"));
  CHECK_THROWS_WITH((adaptive_blocks{.largest = 0}.check()), contains("largest is 0; expected 1 to 256"));
}
