#include "catch.hpp"

#include <tessera/scorer/exact_score.hpp>

#include "laws/policies.hpp"

using namespace tessera;

TEST_CASE("exact_score obeys the laws of scorers") { support::obeys_the_laws_of_scorers(exact_score{}); }

TEST_CASE("exact_score weighs a logit by its probability and protects nothing") {
  CHECK(exact_score{}.weigh(0.0f, 0.0f) == 1.0f);
  CHECK(exact_score{}.protected_tail(100) == 0);
}
