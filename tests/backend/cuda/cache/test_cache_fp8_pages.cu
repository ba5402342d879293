// Scoring and retrieval over fp8 rows on the device, against the CPU's. An index of decoded keys has the same bits on both. A
// window's scores have them where decoding loses nothing: the device rounds decoded keys to 16 bits before it multiplies them, and
// max-pooling would turn a near tie into many other tokens.
#include "cases/cache_case.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/fp8_rows.hpp"
#include "tessera/methods/quest.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/methods/sparq.hpp"

using namespace tessera;
using namespace gpu_test;

TEST_CASE("paged retrieval over fp8 rows holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<quest<bf16, 64, 64, stored<fp8_rows<bf16, 64>, fixed_pages<16>>>>(20);
  hold_conversations<sparq<fp16, 64, 64, stored<fp8_rows<fp16, 64>, runs>>>(20);
}
TEST_CASE("a window's scores of fp8 rows keep on the device what they keep on the CPU", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<snapkv<bf16, 64, 64, stored<fp8_rows<bf16, 64>, runs>>>(20, scales::even);
  hold_conversations<rocketkv<bf16, 64, 64, stored<fp8_rows<bf16, 64>, fixed_pages<16>>>>(20, scales::even);
}
