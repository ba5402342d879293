#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>

using namespace tessera;

TEST_CASE("pages are counted up") {
  CHECK(fixed_pages<16>::pages_for(0) == 0);
  CHECK(fixed_pages<16>::pages_for(1) == 1);
  CHECK(fixed_pages<16>::pages_for(16) == 1);
  CHECK(fixed_pages<16>::pages_for(17) == 2);
  CHECK(fixed_pages<1>::pages_for(17) == 17);
}
