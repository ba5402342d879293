// GPU prefill attention over encoded rows against the CPU's.
#include "backend/cuda/attend/decode_case.hpp"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

/// The error of a chunk over encoded rows, in one part and split. Scales are powers of two, so that the elements that
/// tensor cores read are those that the CPU decodes, to the bit.
template <class Case>
double error_of_chunk(const decode_shape& s) {
  Case one(s);
  for (auto* scales : {&one.k_scales, &one.v_scales}) {
    for (float& scale : *scales) scale = std::exp2(std::round(std::log2(scale)));
  }
  one.d_k_scales.set(one.k_scales), one.d_v_scales.set(one.v_scales);
  one.set_lengths(std::vector<index_t>(std::size_t(one.rows), one.capacity));
  const cuda::prefill_attention<typename Case::view_type> op(s.sequences, s.heads, one.q_heads,
                                                             cuda::device_info::current());
  const auto decode = one.problem();
  buffer<unsigned char> workspace(op.workspace_bytes());
  double worst = 0;
  for (void* scratch : {static_cast<void*>(nullptr), static_cast<void*>(workspace.data)}) {
    one.poison();
    op.run({decode.view, decode.q, decode.first_position, decode.rule, decode.out, decode.lse}, scratch, nullptr);
    cuda::check(cudaDeviceSynchronize(), "prefill attention");
    worst = std::max(worst, one.error_now());
  }
  return worst;
}

}  // namespace

TEST_CASE("GPU prefill attention reads encoded rows") {
  if (gpu_missing()) return;
  for (const index_t tokens : scaled(std::vector<index_t>{3, 64, 150}, 2)) {
    for (const float cap : {0.0f, 15.0f}) {
      const decode_shape s{.heads = 2, .tokens = tokens, .capacity = 400, .soft_cap = cap, .sinks = cap > 0};
      INFO("tokens " << tokens << " cap " << cap);
      CHECK(error_of_chunk<decode_case<fp8_elements<bf16>, 128>>(s) < 5e-3);
      CHECK(error_of_chunk<decode_case<fp8_elements<fp16>, 64, block_table>>(s) < 1e-3);
      CHECK(error_of_chunk<decode_case<fp8_elements<bf16>, 80>>(s) < 5e-3);
      CHECK(error_of_chunk<decode_case<fp8_elements<fp16>, 256>>(s) < 1e-3);
      CHECK(error_of_chunk<decode_case<int8_elements<bf16>, 128, block_table>>(s) < 5e-3);
      CHECK(error_of_chunk<decode_case<grouped_elements<bf16, 4, 64>, 128, block_table>>(s) < 5e-3);
    }
  }
}
