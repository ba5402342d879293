// Segments that raise their tokens' scores: by hand, and what may not happen.
#include "catch.hpp"

#include <cmath>
#include <limits>
#include <vector>

#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/by_segment.hpp>
#include <tessera/scorer/observation_window.hpp>

#include "laws/policies.hpp"

using namespace tessera;
using scorer_type = by_segment<observation_window>;

static_assert(check_scorer<scorer_type>() && segment_scorer<scorer_type> && pooling_scorer<scorer_type>);
static_assert(check_scorer<by_segment<accumulated_attention>>() && segment_scorer<by_segment<accumulated_attention>>);
static_assert(!segment_scorer<observation_window>);

TEST_CASE("by_segment keeps the laws of scorers as the scorer under it does") {
  support::obeys_the_laws_of_scorers(scorer_type{});
  support::obeys_the_laws_of_scorers(by_segment<accumulated_attention>{});
}

TEST_CASE("scores of 1 and 3 have the mean 2 and 0.8113 of the entropy that two tokens can have") {
  const scorer_type scorer;
  const std::vector<float> scores{1, 3};
  const segment_statistics own = scorer.describe_segment(scores.data(), 2);
  CHECK(own.importance == 2);
  CHECK(own.diversity == Approx(0.811278).epsilon(1e-5));
  // Half of the largest importance: weight 0.5 (1 + 0.5 * 0.8113) / 1.5 = 0.4685, factor 1 + 4 * 0.5 * 0.4685.
  CHECK(scorer.rescored(3, own, 4) == Approx(3 * 1.937093).epsilon(1e-5));
  scorer_type balanced;
  balanced.form = segment_form::balance;
  // (1 - 0.5) 0.5 + 0.5 * 0.8113 = 0.6556
  CHECK(balanced.rescored(3, own, 4) == Approx(3 * 2.311278).epsilon(1e-5));
}

TEST_CASE("one token, nothing but zeros and what is not finite have no diversity, and poison nothing") {
  const scorer_type scorer;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> scores{0, 0, nan, 5, -infinity, 5};
  CHECK(scorer.describe_segment(scores.data() + 3, 1).diversity == 0);
  CHECK(scorer.describe_segment(scores.data() + 3, 1).importance == 5);
  CHECK(scorer.describe_segment(scores.data(), 2).diversity == 0);
  CHECK(scorer.describe_segment(scores.data(), 2).importance == 0);
  CHECK(scorer.describe_segment(scores.data(), 0).importance == 0);
  const auto mixed = scorer.describe_segment(scores.data() + 2, 4);
  CHECK(mixed.importance == 2.5f);
  CHECK(mixed.diversity == Approx(0.5).epsilon(1e-5));  // two equal ones of four
  CHECK(std::isnan(scorer.rescored(nan, mixed, 5)));
  CHECK(scorer.rescored(-infinity, mixed, 5) == -infinity);
  CHECK(scorer.rescored(2, scorer.describe_segment(scores.data(), 2), 0) == 2);  // every segment is 0
}

TEST_CASE("tokens of one segment keep their order, whatever the weights") {
  support::rng random(5301);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    scorer_type scorer;
    scorer.alpha = float(random.uniform());
    scorer.lambda = float(random.uniform());
    scorer.strength = float(random.between(0, 100));
    scorer.form = random.chance(0.5) ? segment_form::product : segment_form::balance;
    const segment_statistics own{float(random.uniform()), float(random.uniform())};
    const float a = float(random.uniform()), b = float(random.uniform());
    if (a < b) REQUIRE(scorer.rescored(a, own, 1) <= scorer.rescored(b, own, 1));
    REQUIRE(scorer.rescored(a, own, 1) == scorer.rescored(a, own, 1));
  }
}

TEST_CASE("weights out of range, and what the scorer under it refuses, are refused") {
  scorer_type scorer;
  CHECK_NOTHROW(scorer.check(64));
  scorer.lambda = -0.1f;
  CHECK_THROWS_WITH(scorer.check(64), contains("lambda is -0.1; expected 0 to 1"));
  scorer.lambda = 0.5f;
  scorer.alpha = 2;
  CHECK_THROWS_WITH(scorer.check(64), contains("alpha is 2; expected 0 to 1"));
  scorer.alpha = 0.5f;
  scorer.window = 65;
  CHECK_THROWS_WITH(scorer.check(64), contains("window is 65; expected at most the budget"));
}
