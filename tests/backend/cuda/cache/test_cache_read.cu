// The CUDA cache of the methods that keep everything and read by an estimate, against the CPU's.
#include "cache_case.hpp"
#include "tessera/methods/hsa.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/sparq.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("hsa on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<hsa<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of hsa follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<hsa<bf16, 64, 64>>();
}

TEST_CASE("quest on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<quest<fp16, 64, 64>>(40);
}
TEST_CASE("a recorded step of quest follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<quest<fp16, 64, 64>>();
}

TEST_CASE("sparq on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<sparq<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of sparq follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<sparq<bf16, 64, 64>>();
}
