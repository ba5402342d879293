// Caches of rows in groups of 4 and 2 bits on the device, in runs and in pages, against the CPU's. An index of decoded
// keys has the same bits on both.
#include "cases/calls_case.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/int2_rows.hpp"
#include "tessera/layout/int4_rows.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/streaming_llm.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("int4 rows in pages hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<quest<bf16, 64, 64, stored<int4_rows<bf16, 64>, fixed_pages<16>>>>(20);
}
TEST_CASE("int2 rows in runs hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<streaming_llm<bf16, 64, 64, stored<int2_rows<bf16, 64>, runs>>>(20);
}
TEST_CASE("random calls of int4 rows in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<full<bf16, 64, 64, stored<int4_rows<bf16, 64>, fixed_pages<16>>>>();
}
TEST_CASE("random calls of int4 rows in runs do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<streaming_llm<bf16, 64, 64, stored<int4_rows<bf16, 64>, runs>>>();
}
