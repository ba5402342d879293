// Caches of fp8 and int8 rows on the device, in runs and in pages, against the CPU's.
#include "cases/calls_case.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/layout/int8_rows.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/streaming_llm.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("fp8 rows in runs hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<streaming_llm<bf16, 64, 64, stored<fp8_rows<bf16, 64>, runs>>>(20);
}
TEST_CASE("fp8 rows in pages hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<full<bf16, 64, 64, stored<fp8_rows<bf16, 64>, fixed_pages<16>>>>(20);
}
TEST_CASE("random calls of fp8 rows in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<full<bf16, 64, 64, stored<fp8_rows<bf16, 64>, fixed_pages<16>>>>();
}
TEST_CASE("random calls of fp8 rows in runs do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<streaming_llm<bf16, 64, 64, stored<fp8_rows<bf16, 64>, runs>>>();
}
TEST_CASE("int8 rows in pages hold the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  // The device rounds decoded keys to 16 bits before it scores them: only where that loses nothing is the choice the CPU's.
  hold_conversations<snapkv<bf16, 64, 64, stored<int8_rows<bf16, 64>, fixed_pages<16>>>>(20, scales::even);
}
TEST_CASE("random calls of int8 rows in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<snapkv<bf16, 64, 64, stored<int8_rows<bf16, 64>, fixed_pages<16>>>>();
}
