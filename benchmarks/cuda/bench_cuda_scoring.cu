// Window scoring of 128K keys, pooling and budgets.
#include <cmath>

#include "cuda_bench.hpp"
#include "tessera/backend/cuda/choose/allot.cuh"
#include "tessera/backend/cuda/score/pool.cuh"
#include "tessera/backend/cuda/score/score.cuh"
#include "tessera/budget/adaptive.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/observation_window.hpp"

namespace gpu_bench::of_scoring {
namespace {

constexpr index_t window = 32;

/// The bytes are one read of K: what the bars count in.
prepared window_score(index_t tokens, bool lse_given) {
  using view_type = kv_view<const bf16, head_dim>;
  const std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim;
  const std::size_t query_rows = std::size_t(window) * q_heads;
  prepared made;
  made.bytes = double(elements) * sizeof(bf16);
  made.flops = 2.0 * double(query_rows) * tokens * head_dim * (lse_given ? 1 : 2);
  const int sets = input_sets(made.bytes);
  const cuda::attentive_score<view_type, observation_window> op(1, kv_heads, q_heads, window, tokens,
                                                                cuda::device_info::current());
  struct memory {
    buffer<index_t> length, first;
    buffer<float> lse, scores;
    buffer<unsigned char> workspace;
  };
  // A log-sum-exp of about what normal keys and queries give: log(tokens) + 1/2.
  const auto keep = std::make_shared<memory>(std::vector<index_t>{tokens}, std::vector<index_t>{tokens - window},
                                             std::vector<float>(query_rows, std::log(float(tokens)) + 0.5f),
                                             std::size_t(kv_heads) * std::size_t(tokens), op.workspace_bytes());
  const bf16* pool = random_rows(elements * std::size_t(sets) + query_rows * head_dim);
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    cuda::score_problem<view_type> problem;
    problem.view.k = pool + elements * std::size_t(i % sets);
    problem.view.k_strides = {0, offset_t(tokens) * head_dim, head_dim, 1};
    problem.view.sequences = 1, problem.view.kv_heads = kv_heads;
    problem.view.lengths = keep->length.data();
    problem.q = nhd_rows<const bf16>(pool + elements * std::size_t(sets), window, q_heads, head_dim);
    problem.first_position = keep->first.data();
    if (lse_given) problem.lse = nhd_rows<const float>(keep->lse.data(), window, q_heads, 1);
    problem.lse_complete = lse_given;
    problem.scores = keep->scores.data(), problem.row_stride = tokens;
    op.run(problem, observation_window{}, keep->workspace.data(), stream());
  });
  return made;
}

/// Scores of a layer in several sets, as pooling and budgets read them.
struct layer_memory {
  std::size_t count;
  int sets;
  index_t sequences, tokens;
  buffer<float> in, out;
  buffer<index_t> lengths, counts;
  buffer<unsigned char> workspace;

  layer_memory(index_t b, index_t n, std::size_t workspace_bytes)
      : count(std::size_t(b * kv_heads) * std::size_t(n)),
        sets(input_sets(double(count) * 4)),
        sequences(b),
        tokens(n),
        in(count * std::size_t(sets)),
        out(count),
        lengths(std::vector<index_t>(std::size_t(b * kv_heads), n)),
        counts(std::size_t(b * kv_heads)),
        workspace(workspace_bytes) {
    fill_scores(in.data(), in.count(), score_kind::softmax);
  }
  cuda::score_rows rows(int i) const {
    cuda::score_rows rows;
    rows.scores = in.data() + count * std::size_t(i % sets), rows.row_stride = tokens;
    rows.sequences = sequences, rows.kv_heads = kv_heads;
    rows.lengths = lengths.data(), rows.length_strides = {kv_heads, 1}, rows.tail = window;
    return rows;
  }
};

prepared pool_scores(index_t sequences, index_t tokens, index_t width, pooling kind) {
  const cuda::finish_scores<observation_window> op(sequences, kv_heads, tokens, cuda::device_info::current());
  const auto keep = std::make_shared<layer_memory>(sequences, tokens, 1);
  prepared made;
  made.bytes = double(keep->count) * 8;
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, keep->sets), [&](int i) {
    op.run(keep->rows(i), observation_window{.window = window, .pool = width, .pool_kind = kind}, keep->out.data(),
           stream());
  });
  return made;
}

template <class Budget>
prepared allot_counts(index_t sequences, index_t tokens, const Budget& budget) {
  const cuda::allot<Budget> op(sequences, kv_heads, tokens, cuda::device_info::current());
  const auto keep = std::make_shared<layer_memory>(sequences, tokens, op.workspace_bytes());
  prepared made;
  if constexpr (Budget::compares_heads) made.bytes = double(keep->count) * 4;  // the others read lengths
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, keep->sets), [&](int i) {
    op.run(keep->rows(i), budget, 0, 1, keep->counts.data(), keep->workspace.data(), stream());
  });
  return made;
}

const int registered = [] {
  for (const index_t tokens : {8192, 32768, 131072}) {
    const std::string size = std::to_string(tokens / 1024) + "K";
    add("score/" + size + "/lse_computed", [=] { return window_score(tokens, false); });
    add("score/" + size + "/lse_given", [=] { return window_score(tokens, true); });
  }
  for (const index_t sequences : {1, 8}) {
    const std::string batch = "/B" + std::to_string(sequences);
    for (const index_t width : {7, 63}) {
      const std::string name = std::to_string(width) + batch;
      add("pool/max_" + name, [=] { return pool_scores(sequences, 131072, width, pooling::max); });
      add("pool/average_" + name, [=] { return pool_scores(sequences, 131072, width, pooling::average); });
    }
    add("budget/adaptive" + batch, [=] { return allot_counts(sequences, 131072, adaptive{.tokens = 2048}); });
    add("budget/uniform" + batch, [=] { return allot_counts(sequences, 131072, uniform{.tokens = 2048}); });
  }
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_scoring
