// Which heads choose together, and by which scores.
#include "catch.hpp"

#include <cmath>
#include <limits>

#include <tessera/budget/two_stage.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scope/per_head.hpp>
#include <tessera/scope/per_layer.hpp>
#include <tessera/scope/per_layers.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

using namespace tessera;

static_assert(scope<per_head> && !joining_scope<per_head>);
static_assert(joining_scope<per_layer<over_heads::sum>> && joining_scope<per_layer<over_heads::maximum>>);

TEST_CASE("heads join by their sum, their mean or the largest of them") {
  const per_layer<over_heads::sum> sum;
  const per_layer<over_heads::mean> mean;
  const per_layer<over_heads::maximum> most;
  CHECK(sum.joined(sum.join(1.0f, 2.0f), 4) == 3);
  CHECK(mean.joined(mean.join(1.0f, 2.0f), 4) == 0.75f);
  CHECK(most.joined(most.join(most.join(1.0f, 2.0f), -3.0f), 4) == 2);
}

TEST_CASE("a score that is no number ranks its token last in sum and mean, and says nothing in the maximum") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(per_layer<over_heads::sum>{}.join(1.0f, nan)));
  CHECK(std::isnan(per_layer<over_heads::mean>{}.join(nan, 1.0f)));
  CHECK(per_layer<over_heads::maximum>{}.join(nan, 1.0f) == 1);
  CHECK(per_layer<over_heads::maximum>{}.join(1.0f, nan) == 1);
  CHECK(std::isnan(per_layer<over_heads::maximum>{}.join(nan, nan)));
}

TEST_CASE("a budget that plans over two stages leaves the scope as it is") {
  retain<observation_window, two_stage<uniform>, top_tokens, per_layers<over_heads::sum>> stage;
  stage.scope.reuse = 3;
  CHECK(stage.planned({.capacity = 100, .retained = 90, .read = 20, .ratio = 2}).scope.reuse == 3);
}
