// GPU prefill attention over encoded rows against the CPU's.
#include "backend/cuda/attend/decode_case.hpp"
#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

using namespace tessera;
using namespace gpu_test;
using namespace decode_test;

namespace {

/// The error of a chunk over encoded rows, in one part and split.
template <class Case>
double error_of_chunk(const shape& s) {
  Case one(s);
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
      const shape s{.heads = 2, .tokens = tokens, .capacity = 400, .soft_cap = cap, .sinks = cap > 0};
      INFO("tokens " << tokens << " cap " << cap);
      // Decoded to 16 bits before they are multiplied.
      CHECK(error_of_chunk<decode_case<fp8_elements<bf16>, 128>>(s) < 1.2e-2);
      CHECK(error_of_chunk<decode_case<fp8_elements<fp16>, 64, block_table>>(s) < 2e-3);
    }
  }
}
