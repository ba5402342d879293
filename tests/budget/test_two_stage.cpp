#include "catch.hpp"

#include <limits>

#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>

#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;

namespace {

using rocket = two_stage<uniform>;

static_assert(planning_budget<rocket> && planning_budget<two_stage<adaptive>>);
static_assert(check_budget<rocket>());
static_assert(!planning_budget<uniform>);
static_assert(two_stage<adaptive>::compares_heads && !rocket::compares_heads);

rocket budget_of(index_t tokens, index_t max_new, split_factor split = {}) {
  rocket made;
  made.tokens = tokens;
  made.max_new = max_new;
  made.split = split;
  return made;
}

}  // namespace

TEST_CASE("the plan has the published code's roundings, row by row") {
  struct row {
    index_t length, budget, max_new, capacity, retained, read;
    double ratio;
    index_t page, channels;
  };
  const row rows[] = {
      {16384, 256, 128, 1595, 1467, 128, 6.2305, 3, 61},  {32768, 2048, 128, 9674, 9546, 1024, 4.7236, 3, 81},
      {65536, 512, 128, 3236, 3108, 256, 6.3203, 3, 60},  {98304, 1024, 128, 6500, 6372, 512, 6.3477, 3, 60},
      {131072, 256, 128, 1296, 1168, 128, 5.0625, 3, 75}, {65536, 16384, 200, 42055, 41855, 8192, 2.5668, 2, 99},
      {8192, 4096, 64, 6841, 6777, 2048, 1.6702, 1, 76},  {4096, 4096, 64, 4096, 4032, 2048, 1.0, 1, 128},
      {1000, 256, 512, 1000, 488, 128, 3.906, 2, 65}};
  for (const row& r : rows) {
    CAPTURE(r.length, r.budget);
    const stage_plan plan = budget_of(r.budget, r.max_new).plan(r.length - r.max_new);
    CHECK(plan.capacity == r.capacity);
    CHECK(plan.retained == r.retained);
    CHECK(plan.read == r.read);
    CHECK(plan.ratio == Approx(r.ratio).epsilon(1e-4));
    const hybrid_min_max scorer = hybrid_min_max{}.fitted(plan.ratio, 128);
    CHECK(scorer.page == r.page);
    CHECK(scorer.channels == r.channels);
  }
}

TEST_CASE("the split is the formula's, or what is given") {
  CHECK(split_factor{}.exponent(1) == 0.2);
  CHECK(split_factor{}.exponent(64) == Approx(0.56));
  CHECK(split_factor{}.exponent(1 << 20) == 0.8);
  CHECK(split_factor(0.3).exponent(64) == 0.3);
  // All compression in the second stage: everything is kept. All in the first: a step reads what is kept.
  const stage_plan second = budget_of(64, 100, split_factor(0)).plan(3900);
  CHECK(second.capacity == 4000);
  CHECK(second.retained == 3900);
  CHECK(second.ratio == 62.5);
  const stage_plan first = budget_of(64, 10, split_factor(1)).plan(3990);
  CHECK(first.capacity == 64);
  CHECK(first.ratio == 1);
}

TEST_CASE("what is retained never falls below the answer's room, and nothing overflows") {
  support::rng random(221);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t prompt = random.pick({0, 1, 16, random.between(0, 300), random.between(0, 200'000)});
    const rocket budget =
        budget_of(random.between(16, random.pick({64, 70'000})), random.between(0, random.pick({3, 300})),
                  random.chance(0.5) ? split_factor{} : split_factor(random.uniform()));
    const stage_plan plan = budget.plan(prompt);
    CAPTURE(prompt, budget.tokens, budget.max_new, budget.split.fixed, budget.split.adaptive);
    REQUIRE(plan.capacity == plan.retained + budget.max_new);
    REQUIRE(plan.capacity <= prompt + budget.max_new);
    REQUIRE(plan.retained >= std::min(budget.max_new, prompt));
    REQUIRE(plan.retained <= prompt);
    REQUIRE(plan.ratio >= 1);
    REQUIRE(std::max(plan.retained, plan.read) == budget.planned(plan).tokens);
    const hybrid_min_max scorer = hybrid_min_max{}.fitted(plan.ratio, 128);
    REQUIRE((scorer.page >= 1 && scorer.page <= plan.ratio));
    REQUIRE((scorer.channels >= 1 && scorer.channels <= 128));
  }
  CHECK_THROWS_WITH(budget_of(64, 200).plan(std::numeric_limits<index_t>::max()),
                    contains("max_new is 200; expected at most"));
}

TEST_CASE("the inner budget allots what is planned") {
  two_stage<adaptive> budget;
  budget.tokens = 40;
  budget.inner.floor = 0.5f;
  const adaptive inner = budget.planned({.capacity = 100, .retained = 90, .read = 20, .ratio = 2});
  CHECK(inner.tokens == 90);
  CHECK(inner.floor == 0.5f);
  // A short conversation still keeps what a step attends.
  CHECK(budget.planned({.capacity = 10, .retained = 3, .read = 20, .ratio = 1}).tokens == 20);
  const support::owned_scores scores({{1, 2, 3}, {4, 5}});
  rocket unplanned = budget_of(16, 0);
  unplanned.tokens = 2;
  CHECK(support::counts(unplanned, scores.view(0)) == std::vector<index_t>{2, 2});
}

TEST_CASE("a budget over two stages without sense is refused") {
  CHECK_NOTHROW(budget_of(16, 0).check());
  CHECK_THROWS_WITH(budget_of(15, 128).check(), contains("budget is 15; expected 16 to 16777216"));
  CHECK_THROWS_WITH(budget_of(64, -1).check(), contains("max_new is -1; expected 0 to 16777216"));
  CHECK_NOTHROW(budget_of(64, 1, split_factor(0)).check());
  CHECK_NOTHROW(budget_of(64, 1, split_factor(1)).check());
  for (const double factor : {-0.1, -1.0, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_WITH(budget_of(64, 1, split_factor(factor)).check(), contains("expected adaptive, or 0 to 1"));
  }
  two_stage<adaptive> inner;
  inner.inner.floor = 2;
  CHECK_THROWS_WITH(inner.check(), contains("floor is 2"));
}
