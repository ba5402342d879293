#include "catch.hpp"

#include <tessera/scorer/accumulated_attention.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("accumulated_attention protects half of the budget, or as many recent tokens as it is told") {
  CHECK(accumulated_attention{}.protected_tail(1) == 0);
  CHECK(accumulated_attention{}.protected_tail(33) == 16);
  CHECK(accumulated_attention{.recent = 0}.protected_tail(33) == 0);
  CHECK(accumulated_attention{.recent = 20}.protected_tail(33) == 20);
}

TEST_CASE("accumulated_attention refuses more recent tokens than the budget") {
  CHECK_THROWS_WITH(accumulated_attention{.recent = 34}.check(33),
                    contains("recent is 34; expected at most the budget, which is 33"));
  CHECK_THROWS_AS(accumulated_attention{.recent = -2}.check(33), error);
  CHECK_NOTHROW(accumulated_attention{.recent = 33}.check(33));
}

TEST_CASE("accumulated_attention obeys the laws of scorers") {
  support::obeys_the_laws_of_scorers(accumulated_attention{});
}
