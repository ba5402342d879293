#include "catch.hpp"

#include <tessera/budget/uniform.hpp>

#include "laws/policies.hpp"
#include "support/scores.hpp"

using namespace tessera;

TEST_CASE("uniform gives every head the same count, or all it has") {
  for (const index_t budget : {1, 31, 32, 33}) {
    std::vector<std::vector<float>> heads;
    std::vector<index_t> expected;
    for (const index_t n : {1, 31, 32, 33, 34}) {
      heads.emplace_back(std::size_t(n), 1.0f);
      expected.push_back(std::min(n, budget));
    }
    const support::owned_scores scores(heads);
    CHECK(support::counts(uniform{.tokens = budget}, scores.view(1)) == expected);
  }
}

TEST_CASE("uniform refuses less than one token") {
  CHECK_THROWS_WITH(uniform{.tokens = 0}.check(), contains("budget is 0; expected 1 to 16777216"));
}

TEST_CASE("uniform obeys the laws of budgets") { support::obeys_the_laws_of_budgets(uniform{}); }
