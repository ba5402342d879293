// Every method over fp8 rows against the same method over plain rows that hold what fp8 rows decode to.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>
#include <tessera/methods/ada_snapkv.hpp>
#include <tessera/methods/exact_topk.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/hsa.hpp>
#include <tessera/methods/pyramidkv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/rocketkv_mt.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/sparq.hpp>
#include <tessera/methods/streaming_llm.hpp>

#include "methods/layout_cases.hpp"
#include "support/store_laws.hpp"

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
void as_over_decoded_rows(const std::string& method) {
  CAPTURE(method);
  support::rng random(302);
  const model_data data(random, layout_shape, 200), held = decoded(data);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto plain = make_cache(chosen, layout_shape, workers);
  cache_of<Recipe> encoded(cache<Recipe>(layout_shape, configured<Recipe>(chosen), workers));
  hold_the_same_conversation(encoded, data, *plain, held, [](const auto& got, const auto& expected) {
    for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(std::abs(got[i] - expected[i]) <= 2e-5f);
  });
  CHECK(encoded.full_bytes(100) == 100 * layout_shape.layers * layout_shape.kv_heads * (2 * dim + 8));
}

}  // namespace

TEST_CASE("every method over fp8 rows in pages does as over the decoded values") {
  as_over_decoded_rows<full<fp32, dim, dim, in_pages>>("full");
  as_over_decoded_rows<streaming_llm<fp32, dim, dim, in_pages>>("streaming_llm");
  as_over_decoded_rows<h2o<fp32, dim, dim, in_pages>>("h2o");
  as_over_decoded_rows<snapkv<fp32, dim, dim, in_pages>>("snapkv");
  as_over_decoded_rows<pyramidkv<fp32, dim, dim, in_pages>>("pyramidkv");
  as_over_decoded_rows<ada_snapkv<fp32, dim, dim, in_pages>>("ada_snapkv");
  as_over_decoded_rows<exact_topk<fp32, dim, dim, in_pages>>("exact_topk");
  as_over_decoded_rows<hsa<fp32, dim, dim, in_pages>>("hsa");
  as_over_decoded_rows<quest<fp32, dim, dim, in_pages>>("quest");
  as_over_decoded_rows<sparq<fp32, dim, dim, in_pages>>("sparq");
  as_over_decoded_rows<rocketkv<fp32, dim, dim, in_pages>>("rocketkv");
  as_over_decoded_rows<rocketkv_mt<fp32, dim, dim, in_pages>>("rocketkv_mt");
}

TEST_CASE("methods over fp8 rows in runs do as over the decoded values") {
  as_over_decoded_rows<h2o<fp32, dim, dim, in_runs>>("h2o");
  as_over_decoded_rows<snapkv<fp32, dim, dim, in_runs>>("snapkv");
  as_over_decoded_rows<exact_topk<fp32, dim, dim, in_runs>>("exact_topk");
  as_over_decoded_rows<sparq<fp32, dim, dim, in_runs>>("sparq");
  as_over_decoded_rows<rocketkv<fp32, dim, dim, in_runs>>("rocketkv");
  as_over_decoded_rows<rocketkv_mt<fp32, dim, dim, in_runs>>("rocketkv_mt");
}
