// Exact top-k over rows of fp32 scores.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/choose/top_k.cuh"
#include "tessera/selector/top_blocks.hpp"
#include "tessera/selector/top_tokens.hpp"

namespace gpu_bench::of_select {
namespace {

template <class Selector>
prepared select(Selector selector, index_t rows, index_t n, index_t k, score_kind kind) {
  const cuda::select_slots<Selector> op(selector, rows, n, cuda::device_info::current(), k);
  const std::size_t count = std::size_t(rows) * std::size_t(n);
  prepared made;
  made.bytes = double(count) * sizeof(float);
  const int sets = input_sets(made.bytes);
  struct memory {
    buffer<float> scores;
    buffer<index_t> n, k, out, counts;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(
      count * std::size_t(sets), std::vector<index_t>(std::size_t(rows), n), std::vector<index_t>(std::size_t(rows), k),
      std::size_t(rows) * std::size_t(k), std::size_t(rows), op.workspace_bytes());
  fill_scores(keep->scores.data(), keep->scores.count(), kind);
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    cuda::select_problem problem;
    problem.scores = keep->scores.data() + count * std::size_t(i % sets), problem.score_stride = n;
    problem.n = {keep->n.data()}, problem.keep = {keep->k.data()}, problem.tail = {nullptr, 0};
    problem.out = keep->out.data(), problem.out_stride = k, problem.counts = keep->counts.data();
    op.run(problem, keep->workspace.data(), stream());
  });
  return made;
}

const int registered = [] {
  struct {
    index_t rows, n, k;
  } const shapes[] = {{32, 8192, 512},    {256, 8192, 512},    {32, 32768, 2048}, {8, 131072, 2048},
                      {64, 131072, 2048}, {256, 131072, 2048}, {8, 1048576, 2048}};
  for (const auto& s : shapes) {
    const std::string name = std::to_string(s.rows) + "x" + std::to_string(s.n) + "/k" + std::to_string(s.k);
    add("top_k/" + name + "/normal", [=] { return select(top_tokens{}, s.rows, s.n, s.k, score_kind::normal); });
    add("top_k/" + name + "/softmax", [=] { return select(top_tokens{}, s.rows, s.n, s.k, score_kind::softmax); });
  }
  add("top_blocks_of_16/8x131072/k2048/normal",
      [] { return select(top_blocks{16}, 8, 131072, 2048, score_kind::normal); });
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_select
