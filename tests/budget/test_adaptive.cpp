#include "catch.hpp"

#include <numeric>

#include <tessera/budget/adaptive.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;

namespace {

std::vector<std::vector<float>> candidates_of(const std::vector<std::vector<float>>& heads, index_t tail) {
  auto result = heads;
  for (auto& head : result) head.resize(std::size_t(std::max(0, index_t(head.size()) - tail)));
  return result;
}

}  // namespace

TEST_CASE("adaptive counts as a full sort of all heads does, ties and uneven heads included") {
  support::rng random(61);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t floor = random.pick({0, 200, 500, 1000, random.between(0, 1000)});
    const adaptive policy{.tokens = random.between(1, 40), .floor = float(floor) / 1000};
    const index_t tail = random.between(0, policy.tokens), kv_heads = random.between(1, 6);
    std::vector<std::vector<float>> heads;
    for (index_t h = 0; h < kv_heads; ++h) {
      const index_t n = random.between(1, 80);
      heads.push_back(random.chance(0.7) ? support::tied_scores(random, n, random.pick({1, 2, 6}))
                                         : support::normals(random, std::size_t(n)));
    }
    const support::owned_scores scores(heads);
    REQUIRE(support::counts(policy, scores.view(tail)) ==
            support::oracle::adaptive_counts(candidates_of(heads, tail), scores.tokens, policy.tokens, tail, floor));
  }
}

TEST_CASE("adaptive by hand: the strong head takes what the weak one cannot use, beyond the floor") {
  const support::owned_scores scores({std::vector<float>(100, 2.0f), std::vector<float>(100, 1.0f)});
  // base = 20, 40 places, all won by head 0: 40 * 0.8 + 4 and 0 * 0.8 + 4.
  CHECK(support::counts(adaptive{.tokens = 25, .floor = 0.2f}, scores.view(5)) == std::vector<index_t>{5 + 36, 5 + 4});
  CHECK(support::counts(adaptive{.tokens = 25, .floor = 0}, scores.view(5)) == std::vector<index_t>{5 + 40, 5});
  CHECK(support::counts(adaptive{.tokens = 25, .floor = 1}, scores.view(5)) == std::vector<index_t>{25, 25});
}

TEST_CASE("adaptive gives equal scores to the lower head, then to the lower slot") {
  const support::owned_scores equal({std::vector<float>(10, 1.0f), std::vector<float>(10, 1.0f)});
  CHECK(support::counts(adaptive{.tokens = 6, .floor = 0}, equal.view(0)) == std::vector<index_t>{10, 2});
}

TEST_CASE("adaptive rounds halves to even") {
  // 3 and 1 places won of base 2, floor 0.5: 1.5 + 1 and 0.5 + 1.
  const support::owned_scores scores({{3, 3, 3, 0}, {1, 0, 0, 0}});
  CHECK(support::counts(adaptive{.tokens = 2, .floor = 0.5f}, scores.view(0)) == std::vector<index_t>{2, 2});
}

TEST_CASE("adaptive takes the floor as the decimal fraction that was written") {
  // int(0.2 * 1000) is 200 and int(0.7 * 10) is 7, although 0.2f is above and 0.7f below.
  const support::owned_scores scores({std::vector<float>(4000, 1.0f), std::vector<float>(4000, 0.0f)});
  CHECK(support::counts(adaptive{.tokens = 1000, .floor = 0.2f}, scores.view(0))[1] == 200);
  CHECK(support::counts(adaptive{.tokens = 10, .floor = 0.7f}, scores.view(0))[1] == 7);
}

TEST_CASE("adaptive keeps everything when every head fits, and NaN counts last") {
  const support::owned_scores fits({std::vector<float>(9, 1.0f), std::vector<float>(3, 1.0f)});
  CHECK(support::counts(adaptive{.tokens = 10}, fits.view(2)) == std::vector<index_t>{9, 3});
  const support::owned_scores nan({std::vector<float>(10, std::nanf("")), std::vector<float>(10, -1.0f)});
  CHECK(support::counts(adaptive{.tokens = 5, .floor = 0}, nan.view(0)) == std::vector<index_t>{0, 10});
}

TEST_CASE("adaptive moves a layer's total by at most half a token for each head") {
  support::rng random(62);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    const adaptive policy{.tokens = random.between(9, 40), .floor = float(random.uniform())};
    std::vector<std::vector<float>> heads;
    for (index_t h = 0; h < 6; ++h) heads.push_back(support::normals(random, 400));
    const support::owned_scores scores(heads);
    const auto kept = support::counts(policy, scores.view(8));
    const double total = std::accumulate(kept.begin(), kept.end(), 0.0);
    // int(floor * base) may lose another token a head.
    REQUIRE(total <= 6 * policy.tokens + 3);
    REQUIRE(total >= 6 * policy.tokens - 9);
  }
}

TEST_CASE("adaptive refuses a floor outside 0 to 1") {
  CHECK_THROWS_WITH((adaptive{.floor = 1.5f}.check()), contains("floor is 1.5; expected 0 to 1"));
  CHECK_THROWS_AS((adaptive{.floor = -0.1f}.check()), error);
  CHECK_THROWS_AS((adaptive{.floor = std::nanf("")}.check()), error);
  CHECK_NOTHROW((adaptive{.floor = 1}.check()));
}

TEST_CASE("adaptive obeys the laws of budgets") {
  for (const float floor : {0.0f, 0.2f, 1.0f}) support::obeys_the_laws_of_budgets(adaptive{.floor = floor});
}
