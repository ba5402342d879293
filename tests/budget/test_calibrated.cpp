#include "catch.hpp"

#include <limits>

#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/two_stage.hpp>

#include "laws/policies.hpp"
#include "support/scores.hpp"

using namespace tessera;
using support::rng;

TEST_CASE("calibrated gives ceil(B n) of a turn's tokens on top of what was held") {
  const double table[] = {0.25, 1.0, 0.5, 0.125};  // two layers of two heads
  const calibrated budget{.shares = {table, 2, 2}};
  CHECK(budget.share({0, 2, 0, 2, 0, 9}) == 3);
  CHECK(budget.share({0, 2, 1, 2, 0, 9}) == 9);
  CHECK(budget.share({1, 2, 0, 2, 0, 9}) == 5);
  CHECK(budget.share({1, 2, 1, 2, 0, 9}) == 2);
  // 10 tokens from earlier turns, and a turn of 40 of which 30 have been dropped: ceil(0.25 * 40) on top of 10.
  CHECK(budget.share({0, 2, 0, 2, 0, 20, 10, 30}) == 20);
  CHECK(budget.share({1, 2, 1, 2, 0, 20, 10, 30}) == 15);
}

TEST_CASE("calibrated takes its shares as decimals") {
  const double table[] = {0.55, 0.28, 0.07, 0.29};
  const calibrated budget{.shares = {table, 1, 4}};
  CHECK(budget.share_of(0, 0, 100) == 55);  // in double 0.55 * 100 lies above 55
  CHECK(budget.share_of(0, 1, 200) == 56);
  CHECK(budget.share_of(0, 2, 10'000) == 700);
  CHECK(budget.share_of(0, 3, 100) == 29);
}

TEST_CASE("calibrated follows its definition over random shapes") {
  rng random(1201);
  for (index_t i = 0; i < support::scaled(10'000); ++i) {
    // Shares in 64ths: the oracle counts in whole numbers.
    const index_t layers = random.between(1, 4), heads = random.between(1, 8);
    std::vector<index_t> parts;
    std::vector<double> table;
    for (index_t j = 0; j < layers * heads; ++j) {
      parts.push_back(random.chance(0.1) ? 64 : random.between(1, 64));
      table.push_back(double(parts.back()) / 64);
    }
    const calibrated budget{.shares = {table.data(), layers, heads}};
    budget.check();
    budget.check_model(layers, heads);
    const index_t layer = random.between(0, layers - 1), head = random.between(0, heads - 1);
    const index_t seen = random.pick({0, 1, 31, 32, 33, random.between(0, 5'000), random.between(0, max_tokens)});
    const index_t dropped = random.between(0, seen), earlier = random.between(0, 1'000);
    const std::int64_t part = parts[std::size_t(layer * heads + head)];
    const index_t expected = index_t((part * seen + 63) / 64);
    REQUIRE(budget.share({layer, layers, head, heads, 0, earlier + seen - dropped, earlier, dropped}) ==
            earlier + expected);
    // Of counts that double holds exactly a product may still lie above a whole number: never more than there is.
    REQUIRE(budget.share_of(layer, head, seen) <= seen);
  }
}

TEST_CASE(
    "calibrated without a table keeps exactly its tokens of what it was planned for, and the same share of parts") {
  rng random(1202);
  for (index_t i = 0; i < support::scaled(4'000); ++i) {
    const index_t prompt = random.between(1, 300'000), tokens = random.between(1, max_tokens);
    const calibrated budget = calibrated{.tokens = tokens}.fitted(prompt);
    REQUIRE(budget.share_of(0, 0, prompt) == std::min(tokens, prompt));
    const index_t seen = random.between(0, prompt), kept = budget.share_of(0, 0, seen);
    const std::int64_t wanted = std::int64_t(std::min(tokens, prompt)) * seen;  // of prompt-ths
    REQUIRE(std::int64_t(kept) * prompt >= wanted);
    REQUIRE((kept == 0 || std::int64_t(kept - 1) * prompt < wanted));
  }
  CHECK(!calibrated{}.knows_shares());
  CHECK(calibrated{}.fitted(1).knows_shares());
}

TEST_CASE("a table of ones keeps all of a layer") {
  const double ones[] = {1, 1, 1, 0.999};
  const calibrated budget{.shares = {ones, 2, 2}};
  CHECK(keeps_all(budget, {0, 2, 2, 0, 5'000}));
  CHECK(!keeps_all(budget, {1, 2, 2, 0, 5'000}));
}

TEST_CASE("calibrated refuses shares that are none, and tables of other models") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double share : {0.0, -0.5, 1.0001, nan, double(infinity)}) {
    const double table[] = {0.5, share};
    CHECK_THROWS_WITH((calibrated{.shares = {table, 1, 2}}.check()),
                      contains("share of layer 0, kv_head 1 is ") && contains("expected in (0, 1]; calibrate"));
  }
  const double table[] = {0.5, 0.5, 0.5, 0.5};
  const calibrated budget{.shares = {table, 2, 2}};
  CHECK_THROWS_WITH(budget.check_model(2, 4),
                    contains("kv_heads of the profile is 2; expected those of the model, which "
                             "are 4; pass the profile of this model"));
  CHECK_THROWS_WITH(budget.check_model(3, 2), contains("layers of the profile is 2; expected those of the model"));
}

TEST_CASE("calibrated obeys the laws of budgets") { support::obeys_the_laws_of_budgets(calibrated{}); }
