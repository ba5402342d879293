// What every cache keeps to, held by the device's; the CPU's: tests/cache/test_backend_laws.cpp.
#include "laws/drafts.hpp"

#include "cases/device_side.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/ragged_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

template <class Recipe>
void hold() {
  support::backend_laws<device_side<Recipe>>{{{}, support::rng(4601)}}.hold();
  support::draft_laws<device_side<Recipe>>{{{}, support::rng(4701)}}.hold();
}

}  // namespace

TEST_CASE("the device's caches keep the laws of caches, and of drafts", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold<snapkv<bf16, 64>>();
  hold<snapkv<bf16, 64, 64, stored<dense_rows<bf16, 64>, fixed_pages<16>>>>();
  hold<h2o<bf16, 64>>();
  hold<rocketkv<bf16, 64, 64, stored<dense_rows<bf16, 64>, ragged_pages>>>();
}
