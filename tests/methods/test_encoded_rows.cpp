// Some methods over encoded rows against the same methods over plain rows that hold what the encoded ones decode to.
// tests/every_row_format.sh goes over every method and format, tests/examples/rows over those that the tool has.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>
#include <tessera/layout/int2_rows.hpp>
#include <tessera/layout/int4_rows.hpp>
#include <tessera/layout/int8_rows.hpp>

#include "every_method.hpp"
#include "laws/stores.hpp"
#include "methods/support/layout_cases.hpp"

using namespace tessera;
using namespace methods_test;

namespace {

template <template <element, int, int> class Rows>
using in_pages = stored<Rows<fp32, dim, dim>, fixed_pages<16>>;
template <template <element, int, int> class Rows>
using in_runs = stored<Rows<fp32, dim, dim>, runs>;

/// The same tokens, K and V as rows of the encoding hold them.
template <class Encoding>
model_data decoded(const model_data& data) {
  model_data result = data;
  for (auto* rows : {&result.k, &result.v}) {
    for (std::size_t row = 0; row < rows->size(); row += dim) {
      const auto held = support::decoded_row<Encoding>(rows->data() + row, dim);
      std::copy(held.begin(), held.end(), rows->begin() + offset_t(row));
    }
  }
  return result;
}

template <class Recipe>
void as_over_decoded_rows() {
  using layout = typename Recipe::layout_type;
  using encoding = typename layout::encoding_type;
  const std::string method = Recipe::name;
  CAPTURE(method);
  support::rng random(302);
  const model_data data(random, layout_shape, 200), held = decoded<encoding>(data);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto plain = make_cache(chosen, layout_shape, workers);
  cache_in_layout<Recipe> encoded(chosen, workers);
  hold_the_same_conversation(encoded, data, *plain, held, [](const auto& got, const auto& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(std::abs(got[i] - expected[i]) <= 2e-5f);
  });
  CHECK(encoded.full_bytes(100) == 100 * layout_shape.layers * layout_shape.kv_heads * layout::token_bytes());
}

}  // namespace

#ifdef TESSERA_ROWS_OF_EVERY_METHOD
TEST_CASE("every method over encoded rows in pages does as over the decoded values") {
  for_every_method<fp32, dim, in_pages<TESSERA_ROWS_OF_EVERY_METHOD>>(
      []<class Method>() { as_over_decoded_rows<Method>(); });
}
#endif

TEST_CASE("methods over fp8 rows in runs do as over the decoded values") {
  as_over_decoded_rows<h2o<fp32, dim, dim, in_runs<fp8_rows>>>();
  as_over_decoded_rows<rocketkv_mt<fp32, dim, dim, in_runs<fp8_rows>>>();
  as_over_decoded_rows<sparq<fp32, dim, dim, in_runs<fp8_rows>>>();
}

TEST_CASE("methods over int8 rows do as over the decoded values") {
  as_over_decoded_rows<snapkv<fp32, dim, dim, in_pages<int8_rows>>>();
  as_over_decoded_rows<h2o<fp32, dim, dim, in_runs<int8_rows>>>();
}

TEST_CASE("methods over int4 and int2 rows do as over the decoded values") {
  as_over_decoded_rows<snapkv<fp32, dim, dim, in_pages<int4_rows>>>();
  as_over_decoded_rows<quest<fp32, dim, dim, in_pages<int4_rows>>>();
  as_over_decoded_rows<h2o<fp32, dim, dim, in_runs<int4_rows>>>();
  as_over_decoded_rows<rocketkv<fp32, dim, dim, in_runs<int4_rows>>>();
  as_over_decoded_rows<hsa<fp32, dim, dim, in_runs<int2_rows>>>();
}
