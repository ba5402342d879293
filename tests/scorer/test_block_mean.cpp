#include "catch.hpp"

#include <tessera/scorer/block_mean.hpp>

using namespace tessera;

// What it scores is tested with its reader: tests/backend/cpu/read/test_packed_attention.cpp.
TEST_CASE("block_mean adds a group's query heads by default, and reads means") {
  CHECK(block_mean{}.reduce == row_reduction::sum);
  CHECK(block_mean::reads_means);
  CHECK(block_mean{}.protected_tail(100) == 0);
  CHECK(block_mean::observed == observes::step);
}
