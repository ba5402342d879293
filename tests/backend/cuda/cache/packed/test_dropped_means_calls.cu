// Calls of a cache whose steps read blocks of packed rows behind a choice: what the contract says, recorded steps, bounds.
#include "backend/cuda/cache/cases/bound_case.hpp"
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "dropped_means.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
using competing = means_behind<observation_window, adaptive, dense<bf16, 64>>;
using competing_in_pages = means_behind<observation_window, adaptive, packed_in_pages<bf16, 4>>;
using planned_in_pages = means_behind<observation_window, two_stage<uniform>, packed_in_pages<bf16, 16>>;
}  // namespace

TEST_CASE("random calls that read blocks behind a choice do what the contract says", "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<competing>();
}
TEST_CASE("random calls that read blocks in pages behind a choice do what the contract says",
          "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<competing_in_pages>();
}
TEST_CASE("random calls of blocks under a budget over two stages do what the contract says",
          "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<planned_in_pages>();
}
TEST_CASE("a recorded step that reads blocks behind a choice follows its growing cache", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  replay_steps<competing>();
}
TEST_CASE("a cache that reads blocks behind a choice takes no more than its bound", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  stay_within_bound<competing>();
}
TEST_CASE("a cache that reads blocks in pages behind a choice takes no more than its bound", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  stay_within_bound<competing_in_pages>();
}
