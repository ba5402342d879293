// What every cache keeps to, held by the CPU's; the device's: tests/backend/cuda/cache/test_backend_laws.cu.
#include "catch.hpp"

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/ragged_pages.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/snapkv.hpp>

#include "laws/cpu_side.hpp"
#include "laws/drafts.hpp"

using namespace tessera;

namespace {

template <class Recipe>
void hold() {
  support::backend_laws<support::cpu_side<Recipe>>{{{}, support::rng(4600)}}.hold();
  support::draft_laws<support::cpu_side<Recipe>>{{{}, support::rng(4700)}}.hold();
}

}  // namespace

TEST_CASE("the CPU's caches keep the laws of caches, and of drafts") {
  hold<snapkv<float, 64>>();
  hold<h2o<float, 64>>();
  hold<rocketkv<float, 64>>();
  hold<loopserve<float, 64>>();
  hold<snapkv<float, 64, 64, stored<dense_rows<float, 64>, fixed_pages<16>>>>();
  hold<rocketkv<float, 64, 64, stored<dense_rows<float, 64>, ragged_pages>>>();
}
