#include "catch.hpp"

#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

TEST_CASE("rows in fixed pages obey the laws of layouts") {
  support::obeys_the_laws_of_layouts<stored<dense_rows<fp16, 80, 64>, fixed_pages<16>>>(211);
}

TEST_CASE("pages are counted up") {
  CHECK(fixed_pages<16>::pages_for(0) == 0);
  CHECK(fixed_pages<16>::pages_for(1) == 1);
  CHECK(fixed_pages<16>::pages_for(16) == 1);
  CHECK(fixed_pages<16>::pages_for(17) == 2);
  CHECK(fixed_pages<1>::pages_for(17) == 17);
}

TEST_CASE("the bound of pages is what every layer takes when nothing is dropped") {
  CHECK(fixed_pages<16>::upper_bound_pages(33, 4) == 12);
  CHECK(fixed_pages<16>::upper_bound_pages(0, 4) == 0);
  CHECK(fixed_pages<64>::upper_bound_pages(offset_t(1) << 33, 80) == 80 * (offset_t(1) << 27));
}
