#include "catch.hpp"

#include <limits>

#include <tessera/core/stored/page_extrema.hpp>
#include <tessera/core/views.hpp>

using namespace tessera;

TEST_CASE("an extremum takes in what is finite, and nothing else") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(lower_with(nan, 3) == 3);
  CHECK(upper_with(nan, -3) == -3);
  CHECK(lower_with(1, 2) == 1);
  CHECK(lower_with(2, 1) == 1);
  CHECK(upper_with(1, 2) == 2);
  CHECK(upper_with(2, 1) == 2);
  for (const float bad : {nan, infinity, -infinity}) {
    CHECK(lower_with(2, bad) == 2);
    CHECK(upper_with(2, bad) == 2);
    CHECK(std::isnan(lower_with(nan, bad)));
    CHECK(std::isnan(upper_with(nan, bad)));
  }
}

TEST_CASE("a row of extrema is [2, channels, room], wherever it begins") {
  std::vector<float> memory(1000);
  const page_extrema_view<float, 64> even{.data = memory.data(), .page = 4, .capacity = 3};
  CHECK(even.lower(0, 5) == memory.data() + 5 * 3);
  CHECK(even.upper(0, 5) == memory.data() + (64 + 5) * 3);
  CHECK(even.lower(1, 0) == memory.data() + 2 * 64 * 3);
  const offset_t begins[] = {0, 256};
  const index_t rooms[] = {2, 5};
  const page_extrema_view<float, 64> ragged_rows{
      .data = memory.data(), .page = 4, .begins = begins, .capacities = rooms};
  CHECK(ragged_rows.lower(1, 7) == memory.data() + 256 + 7 * 5);
  CHECK(ragged_rows.upper(1, 7) == memory.data() + 256 + (64 + 7) * 5);
}

TEST_CASE("a filtered table finds its slots behind any other table") {
  const index_t slots[] = {1, 4, 30, 0, 17}, blocks[] = {7, 3};
  const offset_t begin[] = {0, 3};
  const filtered<contiguous> plain{{}, slots, begin, 2};
  CHECK(plain.locate(0, 0, 2).row == 30);
  CHECK(plain.locate(0, 1, 1).row == 17);
  const filtered<block_table> paged{{.blocks = blocks, .page = 16, .sequence_stride = 2}, slots, begin, 2};
  CHECK(paged.locate(0, 0, 2).outer == 3);
  CHECK(paged.locate(0, 0, 2).row == 14);
  CHECK(paged.locate(0, 1, 0).outer == 7);
}
