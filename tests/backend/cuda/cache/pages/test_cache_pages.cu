// The CUDA cache whose rows lie in pages.
#include "backend/cuda/cache/cases/bound_case.hpp"
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/memory_case.hpp"
#include "backend/cuda/cache/cases/serving_case.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
using paged = stored<dense_rows<bf16, 64>, fixed_pages<16>>;
using paged_full = full<bf16, 64, 64, paged>;
using paged_snapkv = snapkv<bf16, 64, 64, paged>;
using paged_rocketkv = rocketkv<bf16, 64, 64, paged>;
}  // namespace

TEST_CASE("snapkv in pages holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<paged_snapkv>(30);
}
TEST_CASE("rocketkv in pages holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<paged_rocketkv>(30);
}
TEST_CASE("sequences in pages take no more than their bound, in a pool of as many pages", "[gpu][cache]") {
  if (gpu_missing()) return;
  stay_within_bound<paged_full>();
  stay_within_bound<paged_rocketkv>();
}
TEST_CASE("a recorded step in pages follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<paged_full>();
}
TEST_CASE("random calls of snapkv in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<paged_snapkv>();
}
TEST_CASE("random calls of rocketkv in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<paged_rocketkv>();
}
TEST_CASE("a cache in pages serves conversations of all lengths in the memory that it began with",
          "[gpu][cache][long]") {
  if (gpu_missing()) return;
  serve<paged_snapkv>(support::scaled(2500), shrunk(64, 4));
}
TEST_CASE("a pool without free pages refuses, and the cache goes on as before", "[gpu][cache][long]") {
  if (gpu_missing()) return;
  refuse_and_go_on<paged_full>();
}
TEST_CASE("every allocation of a cache in pages fails once, and the conversation goes on", "[gpu][cache][long]") {
  if (gpu_missing()) return;
  faulty_conversation<paged_snapkv>::fails_everywhere_once();
}
