// Every method over fp8 rows against the same method over plain rows that hold what fp8 rows decode to.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>

#include "every_method.hpp"
#include "laws/stores.hpp"
#include "methods/support/layout_cases.hpp"

using namespace tessera;
using namespace methods_test;

namespace {

using in_pages = stored<fp8_rows<fp32, dim>, fixed_pages<16>>;
using in_runs = stored<fp8_rows<fp32, dim>, runs>;

/// The same tokens, K and V as fp8 rows hold them.
model_data decoded(const model_data& data) {
  model_data result = data;
  for (auto* rows : {&result.k, &result.v}) {
    for (std::size_t row = 0; row < rows->size(); row += dim) {
      const auto held = support::decoded_row<fp8_elements<fp32>>(rows->data() + row, dim);
      std::copy(held.begin(), held.end(), rows->begin() + offset_t(row));
    }
  }
  return result;
}

template <class Recipe>
void as_over_decoded_rows() {
  const std::string method = Recipe::name;
  CAPTURE(method);
  support::rng random(302);
  const model_data data(random, layout_shape, 200), held = decoded(data);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto plain = make_cache(chosen, layout_shape, workers);
  cache_in_layout<Recipe> encoded(chosen, workers);
  hold_the_same_conversation(encoded, data, *plain, held, [](const auto& got, const auto& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(std::abs(got[i] - expected[i]) <= 2e-5f);
  });
  CHECK(encoded.full_bytes(100) == 100 * layout_shape.layers * layout_shape.kv_heads * (2 * dim + 8));
}

}  // namespace

TEST_CASE("every method over fp8 rows in pages does as over the decoded values") {
  for_every_method<fp32, dim, in_pages>([]<class Method>() { as_over_decoded_rows<Method>(); });
}

TEST_CASE("methods over fp8 rows in runs do as over the decoded values") {
  as_over_decoded_rows<h2o<fp32, dim, dim, in_runs>>();
  as_over_decoded_rows<rocketkv_mt<fp32, dim, dim, in_runs>>();
  as_over_decoded_rows<sparq<fp32, dim, dim, in_runs>>();
}
