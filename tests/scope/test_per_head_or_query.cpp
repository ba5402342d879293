#include "catch.hpp"

#include <tessera/scope/per_head_or_query.hpp>
#include <tessera/scope/per_layer.hpp>

using namespace tessera;

TEST_CASE("per_head_or_query lets kv_heads choose unless it is told otherwise") {
  CHECK_FALSE(per_head_or_query{}.by_query_head());
  CHECK(per_head_or_query{reading_head::q_head}.by_query_head());
  CHECK_FALSE(joining_scope<per_head_or_query>);
  CHECK_FALSE(splitting_scope<per_layer<over_heads::sum>>);
}
