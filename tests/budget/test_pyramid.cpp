#include "catch.hpp"

#include <numeric>

#include <tessera/budget/pyramid.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;

namespace {

/// The count of one head with `n` tokens.
index_t count(const pyramid& policy, index_t layer, index_t layers, index_t tail, index_t n) {
  const support::owned_scores scores({std::vector<float>(std::size_t(n), 0.0f)});
  return support::counts(policy, scores.view(tail, layer, layers))[0];
}

}  // namespace

TEST_CASE("pyramid gives the golden values of its reference code for 32 layers") {
  const pyramid small{.tokens = 128};
  const auto a = small.plan(32, 120, 7992);
  CHECK((a.least == 6 && a.largest == 234 && a.step == 7));
  CHECK(count(small, 0, 32, 8, 8000) == 8 + 234);
  CHECK(count(small, 31, 32, 8, 8000) == 8 + 17);
  std::vector<index_t> outside;
  for (index_t layer = 0; layer < 32; ++layer) outside.push_back(count(small, layer, 32, 8, 8000) - 8);
  CHECK(std::accumulate(outside.begin(), outside.end(), 0.0) / 32 == 125.5);

  const pyramid large{.tokens = 2048};
  const auto b = large.plan(32, 2040, 7992);
  CHECK((b.least == 102 && b.largest == 3978 && b.step == 125));
  CHECK(count(large, 31, 32, 8, 8000) == 8 + 103);

  const auto c = large.plan(32, 2040, 2992);
  CHECK((c.least == 1088 && c.largest == 2992 && c.step == 61));
}

TEST_CASE("pyramid falls back to the same count in every layer for short prompts and for one layer") {
  const pyramid policy{.tokens = 100};
  for (const index_t layer : {0, 5, 11}) {
    CHECK(count(policy, layer, 12, 10, 179) == 100);  // 179 < 2 * base
    CHECK(count(policy, layer, 12, 10, 80) == 80);
  }
  CHECK(count(policy, 0, 12, 10, 180) > count(policy, 11, 12, 10, 180));
  CHECK(count(policy, 0, 1, 10, 10'000) == 100);
  CHECK(count(pyramid{.tokens = 10}, 3, 12, 10, 500) == 10);  // nothing beside the window
}

TEST_CASE("pyramid counts as its reference branches, for random shapes") {
  support::rng random(51);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const pyramid policy{.tokens = random.between(1, 300), .beta = random.between(1, 40)};
    const index_t tail = random.between(0, policy.tokens), layers = random.between(1, 40);
    const index_t layer = random.between(0, layers - 1), n = random.between(1, 1500);
    REQUIRE(count(policy, layer, layers, tail, n) ==
            support::oracle::pyramid_count(layer, layers, policy.tokens, policy.beta, tail, n));
  }
}

TEST_CASE("pyramid falls from layer to layer and keeps the average at or a little above its budget") {
  support::rng random(52);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const pyramid policy{.tokens = random.between(20, 300)};
    const index_t layers = random.between(2, 40), n = random.between(700, 3000);
    index_t before = n, total = 0;
    for (index_t layer = 0; layer < layers; ++layer) {
      const index_t kept = count(policy, layer, layers, 8, n);
      REQUIRE(kept <= before);
      before = kept;
      total += kept;
    }
    REQUIRE(total >= layers * policy.tokens);
    REQUIRE(total <= layers * policy.tokens + layers * layers / 2);
  }
}

TEST_CASE("pyramid counts for the layer that it was told, where one layer is compressed alone") {
  const pyramid all{.tokens = 100};
  for (const index_t layer : {0, 5, 11}) {
    const pyramid alone{.tokens = 100, .layer = layer, .layers = 12};
    CHECK_NOTHROW(alone.check());
    CHECK(count(alone, 0, 1, 10, 900) == count(all, layer, 12, 10, 900));
  }
  CHECK_THROWS_WITH((pyramid{.layer = 12, .layers = 12}.check()), contains("layer is 12 of 12 layers"));
  CHECK_THROWS_AS((pyramid{.layer = 1}.check()), error);
  CHECK_THROWS_AS((pyramid{.layers = 3}.check()), error);
}

TEST_CASE("pyramid refuses a beta below 1") {
  CHECK_THROWS_WITH((pyramid{.beta = 0}.check()), contains("beta is 0; expected 1 to 16777216"));
  CHECK_NOTHROW((pyramid{.beta = 1}.check()));
}

TEST_CASE("pyramid obeys the laws of budgets") {
  support::obeys_the_laws_of_budgets(pyramid{});
  support::obeys_the_laws_of_budgets(pyramid{.beta = 1});
}
