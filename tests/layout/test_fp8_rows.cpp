#include "catch.hpp"

#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

TEST_CASE("fp8 rows obey the laws of layouts, in runs and in pages") {
  support::obeys_the_laws_of_layouts<stored<fp8_rows<fp32, 64>, runs>>(221);
  support::obeys_the_laws_of_layouts<stored<fp8_rows<bf16, 80, 64>, fixed_pages<1>>>(222);
}

TEST_CASE("fp8 rows take a byte an element and two scales, whatever the elements were") {
  CHECK(stored<fp8_rows<bf16, 128>, runs>::token_bytes() == 264);
  CHECK(stored<fp8_rows<fp32, 64>, runs>::token_bytes() == 136);
  CHECK(stored<fp8_rows<fp16, 192, 128>, fixed_pages<16>>::token_bytes() == 328);
  CHECK(double(stored<fp8_rows<bf16, 128>, runs>::token_bytes()) / dense<bf16, 128>::token_bytes() <= 0.52);
}
