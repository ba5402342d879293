#include "catch.hpp"

#include <vector>

#include <tessera/core/error.hpp>
#include <tessera/core/model_shape.hpp>

using namespace tessera;

TEST_CASE("rows of another head dim than the cache's are refused, and rows that do not say theirs are taken") {
  const model_shape shape{1, 4, 2};
  const std::vector<float> data(4 * 128);
  std::vector<float> written(4 * 128);
  const auto rows = [&](index_t heads, index_t dim) { return nhd_rows(data.data(), 1, heads, dim); };
  const auto out = [&](index_t dim) { return nhd_rows(written.data(), 1, 4, dim); };
  CHECK_NOTHROW(shape.check_rows(rows(4, 64), rows(2, 64), rows(2, 80), 64, 80));
  CHECK_THROWS_WITH(shape.check_rows(rows(4, 128), rows(2, 64), rows(2, 64), 64, 64),
                    contains("head dim of q is 128; expected 64"));
  CHECK_THROWS_WITH(shape.check_rows(rows(4, 64), rows(2, 128), rows(2, 64), 64, 64), contains("head dim of k is 128"));
  CHECK_THROWS_WITH(shape.check_rows(rows(4, 64), rows(2, 64), hnd_rows(data.data(), 1, 2, 128), 64, 64),
                    contains("head dim of v is 128"));
  CHECK_THROWS_WITH(shape.check_output(rows(4, 64), out(64), {}, 64, 80),
                    contains("head dim of out is 64; expected 80"));
  CHECK_THROWS_WITH(shape.check_output(rows(4, 128), out(64), {}, 64, 64), contains("head dim of q is 128"));
  // Strides alone, as engines write them by hand.
  const rows_view<const float> unsaid{data.data(), 512, 512, 128, 1, 1, 4};
  CHECK_NOTHROW(shape.check_output(unsaid, out(64), {}, 64, 64));
}
