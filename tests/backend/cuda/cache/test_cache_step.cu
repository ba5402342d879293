// The CUDA cache of the methods that choose nothing, or in every step, against the CPU's.
#include "cache_case.hpp"
#include "tessera/methods/exact_topk.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/h2o.hpp"
#include "tessera/methods/streaming_llm.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("full on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<full<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of full follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<full<bf16, 64, 64>>();
}

TEST_CASE("streaming_llm on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<streaming_llm<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of streaming_llm follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<streaming_llm<bf16, 64, 64>>();
}

TEST_CASE("h2o on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<h2o<fp16, 64, 64>>(40);
}
TEST_CASE("a recorded step of h2o follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<h2o<fp16, 64, 64>>();
}

TEST_CASE("exact_topk on the device holds the CPU's conversations", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<exact_topk<bf16, 64, 64>>(40);
}
TEST_CASE("a recorded step of exact_topk follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<exact_topk<bf16, 64, 64>>();
}
