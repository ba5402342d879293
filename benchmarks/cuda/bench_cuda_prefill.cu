// Causal prefill attention of a whole prompt.
#include "cuda_bench.hpp"

#include "tessera/backend/cuda/attend/prefill/prefill_attention.cuh"

namespace gpu_bench::of_prefill {
namespace {

prepared prefill(index_t tokens) {
  using view_type = kv_view<const bf16, head_dim>;
  const std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim;
  const std::size_t q_elements = std::size_t(q_heads) * std::size_t(tokens) * head_dim;
  prepared made;
  made.bytes = double(elements * 2 + q_elements * 2) * sizeof(bf16);
  made.flops = 4.0 * q_heads * head_dim * double(tokens) * tokens / 2;
  const cuda::prefill_attention<view_type, bf16> op(1, kv_heads, q_heads, cuda::device_info::current());
  struct memory {
    buffer<index_t> length, first;
    buffer<bf16> out;
    buffer<float> lse;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(std::vector<index_t>{tokens}, std::vector<index_t>{0}, q_elements,
                                             std::size_t(q_heads) * std::size_t(tokens), op.workspace_bytes());
  const bf16* pool = random_rows(elements * 2 + q_elements);
  made.keep = keep;
  // Bound by arithmetic: inputs are not rotated.
  made.graph = std::make_unique<replay>(tokens <= 8192 ? 4 : 1, [&](int) {
    cuda::prefill_problem<view_type, bf16> problem;
    problem.view.k = pool, problem.view.v = pool + elements;
    problem.view.k_strides = {0, head_dim, offset_t(kv_heads) * head_dim, 1};
    problem.view.v_strides = problem.view.k_strides;
    problem.view.sequences = 1, problem.view.kv_heads = kv_heads;
    problem.view.lengths = keep->length.data();
    problem.q = nhd_rows<const bf16>(pool + elements * 2, tokens, q_heads, head_dim);
    problem.first_position = keep->first.data();
    problem.out = nhd_rows(keep->out.data(), tokens, q_heads, head_dim);
    problem.lse = nhd_rows(keep->lse.data(), tokens, q_heads, 1);
    op.run(problem, keep->workspace.data(), stream());
  });
  return made;
}

const int registered = [] {
  add("prefill/4K", [] { return prefill(4096); }, 1);
  add("prefill/16K", [] { return prefill(16384); }, 1);
  add("prefill/32K", [] { return prefill(32768); }, 1);
  add("prefill/64K", [] { return prefill(65536); }, 1);
  add("prefill/128K", [] { return prefill(131072); }, 1);
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_prefill
