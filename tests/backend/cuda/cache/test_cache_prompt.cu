// The CUDA cache of the methods that choose once, when a prompt ends, against the CPU's.
#include "cache_case.hpp"
#include "tessera/methods/ada_snapkv.hpp"
#include "tessera/methods/pyramidkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("snapkv on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<snapkv<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of snapkv follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<snapkv<bf16, 64, 64>>();
}

TEST_CASE("pyramidkv on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<pyramidkv<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of pyramidkv follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<pyramidkv<bf16, 64, 64>>();
}

TEST_CASE("ada_snapkv on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<ada_snapkv<fp16, 64, 64>>(40);
}
TEST_CASE("a recorded step of ada_snapkv follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<ada_snapkv<fp16, 64, 64>>();
}
