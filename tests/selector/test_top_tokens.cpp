#include "catch.hpp"

#include <tessera/selector/top_tokens.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {
std::vector<index_t> chosen(const std::vector<float>& scores, index_t tail, index_t keep) {
  std::vector<index_t> out(scores.size());
  top_k_scratch scratch;
  out.resize(std::size_t(top_tokens{}.select(scores.data(), index_t(scores.size()), tail, keep, out.data(), scratch)));
  return out;
}
}  // namespace

TEST_CASE("top_tokens chooses the tail and what a stable sort chooses of the rest") {
  support::rng random(71);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t n = random.between(0, 90), tail = random.between(-1, n + 2), keep = random.between(-1, n + 2);
    auto scores = support::tied_scores(random, n, random.pick({1, 2, 6, 60}));
    for (auto& score : scores) score = random.chance(0.03) ? random.pick({std::nanf(""), infinity, -infinity}) : score;
    REQUIRE(chosen(scores, tail, keep) == support::oracle::top_tokens(scores, tail, keep));
  }
}

TEST_CASE("top_tokens by hand: the tail is kept whatever its score, and counts against keep") {
  CHECK(chosen({5, 1, 4, 9, 0, 0}, 2, 4) == std::vector<index_t>{0, 3, 4, 5});
  CHECK(chosen({5, 1, 4, 9, 0, 0}, 2, 1) == std::vector<index_t>{5});
  CHECK(chosen({1, 1, 1, 1}, 1, 3) == std::vector<index_t>{0, 1, 3});
  CHECK(chosen({2}, 0, 1) == std::vector<index_t>{0});
}

TEST_CASE("top_tokens obeys the laws of selectors") { support::obeys_the_laws_of_selectors(top_tokens{}); }
