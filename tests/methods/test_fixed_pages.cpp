// Every method over fixed pages keeps and reads what it does over runs, and gives the same bits.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>

#include "every_method.hpp"
#include "methods/support/layout_cases.hpp"
#include "support/calls/called_cache.hpp"

using namespace tessera;
using namespace methods_test;

namespace {

using paged = stored<dense_rows<fp32, dim>, fixed_pages<16>>;

template <class Recipe>
void as_over_runs() {
  const std::string method = Recipe::name;
  CAPTURE(method);
  support::rng random(301);
  const model_data data(random, layout_shape, 200);
  const auto workers = std::make_shared<cpu::executor>(2);
  const settings chosen = small_settings(method);
  const auto over_runs = make_cache(chosen, layout_shape, workers);
  cache_in_layout<Recipe> over_pages(chosen, workers);
  hold_the_same_conversation(over_pages, data, *over_runs, data,
                             [](const auto& got, const auto& expected) { REQUIRE(support::same_bits(got, expected)); });
  CHECK(over_pages.bytes_read(0) == over_runs->bytes_read(0));
}

}  // namespace

TEST_CASE("every method over fixed pages keeps, reads and answers as it does over runs, bit for bit") {
  for_every_method<fp32, dim, paged>([]<class Method>() { as_over_runs<Method>(); });
}
