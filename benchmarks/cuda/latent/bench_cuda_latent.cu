// Attention over latent rows (MLA): decode steps of DeepSeek's shapes, over everything and over a selection.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/attend/decode/decode_attention.cuh"

namespace gpu_bench::of_latent {
namespace {

constexpr index_t page = 64, dim = 576, v_dim = 512;

struct latent_shape {
  index_t heads, sequences, tokens;
  index_t chosen = 0;  ///< of every row, in runs of 16; 0: everything
};

prepared latent_decode(const latent_shape& s) {
  using view_type = latent_view<const bf16, block_table>;
  std::mt19937 random(23);
  const std::size_t elements = std::size_t(s.sequences) * std::size_t(s.tokens) * dim;
  const std::size_t q_rows = std::size_t(s.sequences * s.heads);
  std::vector<index_t> blocks(std::size_t(s.sequences) * std::size_t(s.tokens / page));
  for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = index_t(i);
  std::shuffle(blocks.begin(), blocks.end(), random);

  prepared made;
  const double read = double(s.sequences) * (s.chosen ? s.chosen : s.tokens);
  made.bytes = read * dim * sizeof(bf16);
  const int sets = input_sets(made.bytes), kv_sets = s.chosen ? 1 : sets;
  std::vector<index_t> indices;
  for (index_t i = 0; s.chosen && i < s.sequences * sets; ++i) {
    const auto row = random_subset(s.tokens, s.chosen, 16, random);
    indices.insert(indices.end(), row.begin(), row.end());
  }
  const cuda::decode_attention<view_type, bf16> op(s.sequences, 1, s.heads, 1, cuda::device_info::current());
  struct memory {
    buffer<index_t> lengths, first, blocks, indices, counts;
    buffer<bf16> out;
    buffer<float> lse;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(std::vector<index_t>(std::size_t(s.sequences), s.tokens),
                                             std::vector<index_t>(std::size_t(s.sequences), s.tokens - 1), blocks,
                                             indices, std::vector<index_t>(std::size_t(s.sequences), s.chosen),
                                             q_rows * v_dim, q_rows, op.workspace_bytes());
  const bf16* pool = random_rows(elements * std::size_t(kv_sets) + q_rows * dim);
  const bf16* q = pool + elements * std::size_t(kv_sets);
  op.prepare(keep->workspace.data(), stream());
  cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    cuda::decode_problem<view_type, bf16> problem;
    problem.view.k = pool + elements * std::size_t(i % kv_sets);
    problem.view.k_strides = {offset_t(page) * dim, 0, dim, 1};
    problem.view.table = {keep->blocks.data(), page, s.tokens / page, 0};
    problem.view.sequences = s.sequences, problem.view.kv_heads = 1;
    problem.view.lengths = keep->lengths.data(), problem.view.length_strides = {1, 0};
    problem.q = nhd_rows<const bf16>(q, 1, s.heads, dim, s.sequences);
    problem.first_position = keep->first.data();
    problem.out = nhd_rows(keep->out.data(), 1, s.heads, v_dim, s.sequences);
    problem.lse = nhd_rows(keep->lse.data(), 1, s.heads, 1, s.sequences);
    if (s.chosen) {
      const index_t* chosen =
          keep->indices.data() + std::size_t(s.sequences) * std::size_t(s.chosen) * std::size_t(i % sets);
      problem.chosen = {chosen, keep->counts.data(), nullptr, s.chosen};
    }
    op.run(problem, keep->workspace.data(), stream());
  });
  return made;
}

const int registered = [] {
  // Only compute capability 9.0 has the kernel.
  int major = 0;
  const cudaError_t asked = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (asked != cudaSuccess) cudaGetLastError();
  if (asked != cudaSuccess || major != 9) return 0;
  for (const index_t heads : {16, 128}) {
    const std::string name = "latent/H" + std::to_string(heads);
    add(name + "/B1/32K", [=] { return latent_decode({heads, 1, 32768}); });
    add(name + "/B8/32K", [=] { return latent_decode({heads, 8, 32768}); });
    add(name + "/B64/8K", [=] { return latent_decode({heads, 64, 8192}); });
    add(name + "/B8/32K/2K_chosen", [=] { return latent_decode({heads, 8, 32768, 2048}); });
  }
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_latent
