#include "catch.hpp"

#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/layout/dense.hpp>

#include "laws/attention.hpp"

using namespace tessera;

TEST_CASE("every attention obeys the laws of attention") {
  support::obeys_the_laws_of_attention<dense_decode, dense<fp32, 64>>(231);
  support::obeys_the_laws_of_attention<gathered_decode, dense<fp32, 64>>(232);
}

TEST_CASE("every attention's rule can be set, and says whether it gathers") {
  CHECK(!dense_decode::gathers);
  CHECK(gathered_decode::gathers);
  CHECK(dense_decode{.rule = {.scale = 0.5f}}.rule.scale_for(64) == 0.5f);
  CHECK(dense_decode{}.rule.scale_for(64) == 0.125f);
}
