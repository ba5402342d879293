// Calls of a cache that drops packed rows: what the contract says, recorded steps, what it takes, what it refuses.
#include "backend/cuda/cache/cases/bound_case.hpp"
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/ada_snapkv.hpp"
#include "tessera/methods/mosaickv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
using dropping = ada_snapkv<bf16, 64, 64, mosaic_rows<dense<bf16, 64>>>;
using dropping_pages = ada_snapkv<bf16, 64, 64, mosaic_rows<stored<dense_rows<bf16, 64>, fixed_pages<4>>>>;
}  // namespace

TEST_CASE("random calls that drop packed rows do what the contract says", "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<dropping>();
}
TEST_CASE("random calls that drop packed rows in pages do what the contract says", "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<dropping_pages>();
}
TEST_CASE("a recorded step behind dropped packed rows follows its growing cache", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  replay_steps<dropping>();
}
TEST_CASE("a cache that drops packed rows takes no more than its bound", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  stay_within_bound<dropping>();
}
TEST_CASE("a cache that drops packed rows in pages takes no more than its bound", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  stay_within_bound<dropping_pages>();
}
TEST_CASE("strategies are not searched on the device where tokens are dropped", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  dropping method;
  method.layout.rows.strategy.strategy = strategy_choice::searched;
  cuda::cache_options options;
  options.tokens = 512;
  CHECK_THROWS_WITH(cuda::cache<dropping>({1, 2, 1}, method, options), contains("strategy") && contains("fixed"));
}
