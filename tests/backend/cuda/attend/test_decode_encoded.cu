// GPU decode attention over encoded rows: fp8, and encodings that exist in the tests only.
#include "backend/cuda/attend/decode_case.hpp"
#include "support/open_layouts.hpp"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;
using support::half_elements;
using support::integer_elements;
using support::plain_fp8_elements;

TEST_CASE("GPU decode attention reads fp8 rows, and computes with them as exactly as with fp16") {
  if (gpu_missing()) return;
  try_shapes<decode_case<fp8_elements<bf16>, 64>>(12, 2e-3);
  try_shapes<decode_case<fp8_elements<bf16>, 80>>(12, 2e-3);
  try_shapes<decode_case<fp8_elements<bf16>, 96, block_table>>(6, 2e-3);
  try_shapes<decode_case<fp8_elements<bf16>, 128>>(12, 2e-3);
  try_shapes<decode_case<fp8_elements<bf16>, 128, block_table>>(12, 2e-3);
  try_shapes<decode_case<fp8_elements<fp16>, 192, contiguous, 128, fp16>>(6, 2e-3);
  try_shapes<decode_case<fp8_elements<bf16>, 256>>(12, 2e-3);
  try_shapes<decode_case<plain_fp8_elements<bf16>, 128, block_table>>(6, 2e-3);
}

TEST_CASE("GPU decode attention reads int8 rows, and computes with them as exactly as with fp16") {
  if (gpu_missing()) return;
  try_shapes<decode_case<int8_elements<bf16>, 64>>(12, 2e-3);
  try_shapes<decode_case<int8_elements<bf16>, 80>>(6, 2e-3);
  try_shapes<decode_case<int8_elements<bf16>, 128, block_table>>(12, 2e-3);
  try_shapes<decode_case<int8_elements<fp16>, 192, contiguous, 128, fp16>>(6, 2e-3);
}

TEST_CASE("a row of int8 whose scale is NaN shows to those query rows alone that see it") {
  if (gpu_missing()) return;
  for (const bool keys : {false, true}) {
    for (const bool gather : {false, true}) {
      INFO("in keys " << keys << " gather " << gather);
      const decode_shape window{.tokens = 3, .capacity = 400, .window = 100, .gather = gather};
      CHECK(error_of_spoiled<decode_case<int8_elements<bf16>, 128>>(window, keys, NAN, {99, 101, 250}) < 2e-3);
    }
  }
}

TEST_CASE("GPU decode attention reads rows of any encoding") {
  if (gpu_missing()) return;
  // Decoded to 16 bits before they are multiplied.
  try_shapes<decode_case<integer_elements<bf16>, 128>>(12, 1.2e-2);
  try_shapes<decode_case<integer_elements<fp16>, 80, block_table>>(12, 2e-3);
  try_shapes<decode_case<half_elements<bf16>, 64, block_table>>(6, 1.2e-2);
}

TEST_CASE("scales of fp8 rows may differ by many powers of two, and queries be large or small") {
  if (gpu_missing()) return;
  using fp8_case = decode_case<fp8_elements<bf16>, 128>;
  for (const float up : {1e-12f, 1.0f, 1e12f}) {
    for (const bool gather : {false, true}) {
      fp8_case one({.sequences = 2, .heads = 2, .tokens = 2, .capacity = 500, .gather = gather});
      // Ascending over the tokens, so that outputs are rescaled often.
      for (std::size_t i = 0; i < one.v_scales.size(); ++i) {
        one.v_scales[i] *= up * std::exp2(float(int(i % std::size_t(one.capacity)) / 16 - 16));
      }
      for (auto& scale : one.k_scales) scale *= up;
      for (std::size_t row = 0; row < one.q.size() / 128; ++row) {
        for (std::size_t d = 0; d < 128; ++d) one.q[row * 128 + d] = bf16(float(one.q[row * 128 + d]) / up);
      }
      for (std::size_t d = 0; d < 128; ++d) one.q[d] = bf16(0.0f);  // a row of zeros weighs all alike
      one.d_v_scales.set(one.v_scales), one.d_k_scales.set(one.k_scales), one.d_q.set(one.q);
      const auto op = one.operation();
      buffer<unsigned char> workspace(op.workspace_bytes());
      op.prepare(workspace.data, nullptr);
      one.poison();
      op.run(one.problem(), workspace.data, nullptr);
      cuda::check(cudaDeviceSynchronize(), "decode attention");
      CHECK(one.error_now() < 2e-3);
    }
  }
}

TEST_CASE("fp8 NaN shows to those query rows alone that see it") {
  if (gpu_missing()) return;
  for (const bool keys : {false, true}) {
    for (const bool gather : {false, true}) {
      INFO("in keys " << keys << " gather " << gather);
      const decode_shape two{.tokens = 2, .capacity = 400, .gather = gather};
      CHECK(error_of_spoiled<decode_case<fp8_elements<bf16>, 128>>(two, keys, NAN, {1}) < 2e-3);
      for (const index_t tokens : {1, 3}) {
        const decode_shape window{.tokens = tokens, .capacity = 400, .window = 100, .gather = gather};
        CHECK(error_of_spoiled<decode_case<fp8_elements<bf16>, 128>>(window, keys, NAN, {99, 101, 250}) < 2e-3);
        CHECK(error_of_spoiled<decode_case<fp8_elements<bf16>, 80>>(window, keys, NAN, {101, 104}) < 2e-3);
      }
    }
  }
}

TEST_CASE("GPU decode attention refuses encoded rows without scales or out of line") {
  if (gpu_missing()) return;
  decode_case<fp8_elements<bf16>, 64> encoded({.sequences = 1, .heads = 2, .group = 2, .capacity = 64});
  const auto op = encoded.operation();
  buffer<unsigned char> workspace(op.workspace_bytes());
  auto without = encoded.problem(), crooked = encoded.problem();
  without.view.scales = {};
  crooked.view.k += 8;
  CHECK_THROWS_WITH(op.run(without, workspace.data, nullptr), contains("scales of K and V"));
  CHECK_THROWS_WITH(op.run(crooked, workspace.data, nullptr), contains("address of K"));
}
