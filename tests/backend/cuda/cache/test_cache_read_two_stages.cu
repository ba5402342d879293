// The CUDA cache of a first stage before one that reads by an estimate, against the CPU's.
#include "cache_case.hpp"
#include "tessera/budget/adaptive.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/rocketkv_mt.hpp"
#include "tessera/scorer/page_min_max.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("rocketkv on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<rocketkv<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of rocketkv follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<rocketkv<bf16, 64, 64>>();
}

TEST_CASE("rocketkv_mt on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<rocketkv_mt<fp16, 64, 64>>(40);
}
TEST_CASE("a recorded step of rocketkv_mt follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<rocketkv_mt<fp16, 64, 64>>();
}

// Mixtures that no paper has: another first stage before another second one.
template <class Retain, class Scorer>
using mixture = recipe<Retain, dense<bf16, 64>, tessera::retrieve<Scorer, top_tokens>, gathered_decode, once>;

TEST_CASE("Ada-SnapKV's first stage before HSA holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<mixture<retain<observation_window, adaptive, top_tokens>, hybrid_min_max>>(20);
}
TEST_CASE("SnapKV before Quest holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<mixture<retain<observation_window, uniform, top_tokens>, page_min_max>>(20);
}
