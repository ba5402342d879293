// Scorers by what is stored, and those that observe nothing or the newest query: laws, and by hand.
#include "catch.hpp"

#include <cmath>
#include <set>

#include <tessera/scorer/key_difference.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/scorer/lag_relative.hpp>
#include <tessera/scorer/newest_attention.hpp>
#include <tessera/scorer/random_score.hpp>

#include "laws/policies.hpp"

using namespace tessera;

namespace {

template <class S>
float scored(const S& scorer, const std::vector<float>& row, const std::vector<float>& anchor) {
  float sums[S::measures] = {};
  for (std::size_t d = 0; d < row.size(); ++d) scorer.measure(row[d], anchor[d], sums);
  return scorer.score(sums);
}

}  // namespace

TEST_CASE("scorers by contents, chance and the newest query keep the laws of scorers") {
  support::obeys_the_laws_of_scorers(key_norm{});
  support::obeys_the_laws_of_scorers(key_difference{});
  support::obeys_the_laws_of_scorers(random_score{});
  support::obeys_the_laws_of_scorers(newest_attention{});
  support::obeys_the_laws_of_scorers(lag_relative{});
}

TEST_CASE("key_norm is minus the norm: the shortest key is kept first") {
  CHECK(scored(key_norm{}, {3, 4, 0}, {0, 0, 0}) == -5);
  CHECK(scored(key_norm{}, {0, 0, 0}, {9, 9, 9}) == 0);
}

TEST_CASE("key_difference is minus the cosine: 1 away from the mean, -1 along it, 0 for a key of zeros") {
  const key_difference scorer;
  CHECK(scored(scorer, {2, 0}, {5, 0}) == -1);
  CHECK(scored(scorer, {-2, 0}, {5, 0}) == 1);
  CHECK(scored(scorer, {0, 3}, {5, 0}) == 0);
  CHECK(scored(scorer, {0, 0}, {5, 0}) == 0);
  CHECK(scored(scorer, {1, 1}, {1, 0}) == Approx(-std::sqrt(0.5)));
  CHECK(std::isnan(scored(scorer, {1e30f, 1}, {1e-30f, 0})));  // a norm that overflows: not 0, the middle of all scores
  const float sums[] = {25, 0, 0};
  CHECK(scorer.anchor_scale(sums) == 0.2f);
}

TEST_CASE("lag_relative spreads a row on the scale of the next partition") {
  const lag_relative scorer;
  // Elements 0.5 and 1.5 of ranges [0, 1] and [0, 2] are 0.5 and 0.75: deviation 0.125 * sqrt(2).
  float sums[2] = {};
  scorer.measure(0.5f, scorer.scale(0, 1), sums);
  scorer.measure(1.5f, scorer.scale(0, 2), sums);
  CHECK(scorer.spread(sums, 2) == Approx(0.125 * std::sqrt(2.0)));
  float flat[2] = {};
  scorer.measure(7, scorer.scale(3, 3), flat);  // a channel that does not vary
  scorer.measure(7, scorer.scale(infinity, -infinity), flat);
  scorer.measure(7, scorer.scale(0, 1e-45f), flat);  // by less than has an inverse
  CHECK(scorer.spread(flat, 2) == 0);
  CHECK(scorer.outside(3, 100) == infinity);
  CHECK(scorer.outside(50, 100) < scorer.outside(51, 100));
  for (const index_t stored : {1'000, 1 << 24, 1 << 30}) {  // however much is stored, the newest tokens differ
    for (index_t behind = 1; behind < 2 * scorer.lag; ++behind)
      REQUIRE(scorer.outside(stored - behind, stored) > scorer.outside(stored - behind - 1, stored));
  }
  CHECK_THROWS_WITH(scorer.check(4), contains("sinks is 4; expected at most one less than the budget"));
  CHECK_THROWS_WITH((lag_relative{.lag = 1}.check(40)), contains("lag is 1; expected 2 to"));
}

TEST_CASE("random_score is even, different for every seed, and alike for one") {
  for (const index_t seed : {0, 1, 77}) {
    const random_score chance{seed};
    double sum = 0;
    std::set<float> seen;
    for (index_t at = 0; at < 10'000; ++at) {
      const float score = chance.score(at, 10'000);
      REQUIRE((score >= 0 && score < 1));
      REQUIRE(chance.score(at, 5) == score);
      sum += double(score);
      seen.insert(score);
    }
    CHECK(sum / 10'000 == Approx(0.5).margin(0.01));
    CHECK(seen.size() > 9'990);
  }
  CHECK(random_score{1}.score(5, 9) != random_score{2}.score(5, 9));
  CHECK_THROWS_WITH(random_score{-1}.check(1), contains("seed is -1"));
}
