// Every method over fixed pages keeps and reads what it does over runs, and gives the same bits.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>
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

using namespace tessera;
using namespace methods_test;

namespace {

using paged = stored<dense_rows<fp32, dim>, fixed_pages<16>>;

template <class Recipe>
void as_over_runs(const std::string& method) {
  CAPTURE(method);
  support::rng random(301);
  const model_data data(random, layout_shape, 200);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto over_runs = make_cache(chosen, layout_shape, workers);
  cache_of<Recipe> over_pages(cache<Recipe>(layout_shape, configured<Recipe>(chosen), workers));
  hold_the_same_conversation(over_pages, data, *over_runs, data, [](const auto& got, const auto& expected) {
    REQUIRE(support::same_bits(got, expected));
  });
  CHECK(over_pages.bytes_read(0) == over_runs->bytes_read(0));
}

}  // namespace

TEST_CASE("every method over fixed pages keeps, reads and answers as it does over runs, bit for bit") {
  as_over_runs<full<fp32, dim, dim, paged>>("full");
  as_over_runs<streaming_llm<fp32, dim, dim, paged>>("streaming_llm");
  as_over_runs<h2o<fp32, dim, dim, paged>>("h2o");
  as_over_runs<snapkv<fp32, dim, dim, paged>>("snapkv");
  as_over_runs<pyramidkv<fp32, dim, dim, paged>>("pyramidkv");
  as_over_runs<ada_snapkv<fp32, dim, dim, paged>>("ada_snapkv");
  as_over_runs<exact_topk<fp32, dim, dim, paged>>("exact_topk");
  as_over_runs<hsa<fp32, dim, dim, paged>>("hsa");
  as_over_runs<quest<fp32, dim, dim, paged>>("quest");
  as_over_runs<sparq<fp32, dim, dim, paged>>("sparq");
  as_over_runs<rocketkv<fp32, dim, dim, paged>>("rocketkv");
  as_over_runs<rocketkv_mt<fp32, dim, dim, paged>>("rocketkv_mt");
}
