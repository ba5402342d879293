// The CUDA cache of packed rows whose whole rows lie in pages.
#include "backend/cuda/cache/cases/calls_case.hpp"
#include "backend/cuda/cache/cases/memory_case.hpp"
#include "backend/cuda/cache/cases/steps_case.hpp"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/mosaickv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {
using paged_mosaickv = mosaickv<bf16, 64, 64, stored<dense_rows<bf16, 64>, fixed_pages<16>>>;
}  // namespace

TEST_CASE("packed rows with a tail in pages hold the CPU's conversations on the device", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  hold_conversations<paged_mosaickv>(20);
}
TEST_CASE("a recorded step of packed rows with a tail in pages follows its growing cache", "[gpu][cache][packed]") {
  if (gpu_missing()) return;
  replay_steps<paged_mosaickv>();
}
TEST_CASE("random calls of packed rows with a tail in pages do what the contract says", "[gpu][cache][calls][packed]") {
  if (gpu_missing()) return;
  call_at_random<paged_mosaickv>();
}
TEST_CASE("every allocation of packed rows with a tail in pages fails once, and the conversation goes on",
          "[gpu][cache][long][packed]") {
  if (gpu_missing()) return;
  faulty_conversation<paged_mosaickv>::fails_everywhere_once();
}
