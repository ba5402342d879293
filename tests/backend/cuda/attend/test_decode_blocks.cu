// GPU decode attention over rows of blocks: groups in 4 and 2 bits.
#include "backend/cuda/attend/decode_case.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

template <class T, int D>
using int4_of = grouped_elements<T, 4, group_elements(D, D)>;
template <class T, int D>
using int2_of = grouped_elements<T, 2, group_elements(D, D)>;

}  // namespace

TEST_CASE("GPU decode attention reads groups in 4 bits") {
  if (gpu_missing()) return;
  try_shapes<decode_case<int4_of<bf16, 64>, 64>>(12);
  try_shapes<decode_case<int4_of<bf16, 80>, 80, block_table>>(6);
  try_shapes<decode_case<int4_of<bf16, 128>, 128>>(12);
  try_shapes<decode_case<int4_of<bf16, 128>, 128, block_table>>(12);
  try_shapes<decode_case<grouped_elements<fp16, 4, 64>, 192, contiguous, 128, fp16>>(6, 2e-3);
}

TEST_CASE("GPU decode attention reads groups in 2 bits") {
  if (gpu_missing()) return;
  try_shapes<decode_case<int2_of<bf16, 128>, 128>>(12);
  try_shapes<decode_case<int2_of<bf16, 128>, 128, block_table>>(12);
  try_shapes<decode_case<int2_of<fp16, 96>, 96>>(6, 2e-3);
}

TEST_CASE("a group of NaN shows to those query rows alone that see it") {
  if (gpu_missing()) return;
  for (const bool keys : {false, true}) {
    for (const bool gather : {false, true}) {
      INFO("in keys " << keys << " gather " << gather);
      const decode_shape window{.tokens = 3, .capacity = 400, .window = 100, .gather = gather};
      CHECK(error_of_spoiled<decode_case<int4_of<bf16, 128>, 128>>(window, keys, NAN, {99, 101, 250}) < 5e-3);
      CHECK(error_of_spoiled<decode_case<int2_of<bf16, 128>, 128>>(window, keys, NAN, {99, 101, 250}) < 5e-3);
    }
  }
}
