#include "catch.hpp"

#include <tessera/layout/dense.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

TEST_CASE("dense obeys the laws of layouts") {
  support::obeys_the_laws_of_layouts<dense<fp32, 64>>(201);
  support::obeys_the_laws_of_layouts<dense<bf16, 64, 80>>(202);
}

TEST_CASE("dense takes the bytes of K and V rows for every type and head dim") {
  CHECK(dense<fp32, 64>::token_bytes() == 512);
  CHECK(dense<fp16, 64>::token_bytes() == 256);
  CHECK(dense<bf16, 80>::token_bytes() == 320);
  CHECK(dense<bf16, 96>::token_bytes() == 384);
  CHECK(dense<bf16, 256>::token_bytes() == 1024);
  CHECK(dense<bf16, 192, 128>::token_bytes() == 640);
}
