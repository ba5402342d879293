// Scoring of 128K keys by what is stored or by what queries are like, and whole choices of a prompt's end.
#include "cuda_bench.hpp"
#include "tessera/backend/cuda/choose/score_and_choose.cuh"
#include "tessera/backend/cuda/score/expected/query_sums.cuh"
#include "tessera/methods/expected_attention.hpp"
#include "tessera/methods/sablock.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/scorer/key_difference.hpp"
#include "tessera/scorer/key_norm.hpp"
#include "tessera/scorer/lag_relative.hpp"
#include "tessera/scorer/value_norm.hpp"

namespace gpu_bench::of_choosing {
namespace {

constexpr index_t tokens = 131072;
constexpr std::size_t elements = std::size_t(kv_heads) * std::size_t(tokens) * head_dim;
using view_type = kv_view<const bf16, head_dim>;

/// Rows of one layer, of the i-th set of keys and values.
view_type layer_rows(const bf16* pool, int i, const index_t* length) {
  view_type view;
  view.k = pool + elements * 2 * std::size_t(i), view.v = view.k + elements;
  view.k_strides = view.v_strides = {0, offset_t(tokens) * head_dim, head_dim, 1};
  view.sequences = 1, view.kv_heads = kv_heads;
  view.lengths = length;
  return view;
}
constexpr double row_bytes = double(elements) * sizeof(bf16);  // of K, or of V
int sets_of_rows() { return input_sets(2 * row_bytes); }

/// The bytes are those that the scorer must see: `reads` times K or V.
template <class Op, class Scorer>
prepared stored_score(double reads) {
  const Op op(kv_heads, tokens);
  struct memory {
    buffer<index_t> length;
    buffer<float> scores;
    buffer<unsigned char> workspace;
  };
  const auto keep = std::make_shared<memory>(std::vector<index_t>{tokens}, std::size_t(kv_heads) * std::size_t(tokens),
                                             op.workspace_bytes());
  const int sets = sets_of_rows();
  const bf16* pool = random_rows(elements * 2 * std::size_t(sets));
  prepared made;
  made.bytes = reads * row_bytes;
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    op.run(layer_rows(pool, i % sets, keep->length.data()), Scorer{}, keep->scores.data(), tokens,
           keep->workspace.data(), stream());
  });
  return made;
}

/// A layer's whole choice of 1,024 tokens when a prompt of 128K ends, the rows that stay not moved: of 32 layers each takes as
/// long. Segments have 1 to 40 tokens.
template <class Method>
prepared choice() {
  using retain_type = typename Method::retain_type;
  using policy_type = decltype(std::declval<const retain_type>().planned(stage_plan{}));
  Method method;
  method.set_budget(1024);
  constexpr bool by_queries = retain_type::observed == observes::window;
  index_t window = 0;
  if constexpr (by_queries) window = method.retain.scorer.window;
  const policy_type policy = method.retain.planned(method.retain.plan(tokens));
  const cuda::score_and_choose<view_type, policy_type> op(
      policy,
      {1, kv_heads, q_heads, std::max(window, 1), tokens,
       std::max<index_t>(1025, cuda::max_retained(policy, 32, kv_heads, tokens, 1))},
      cuda::device_info::current());
  struct memory {
    buffer<index_t> length, first, segments;
    buffer<query_statistics> statistics;
    buffer<unsigned char> workspace;
    cuda::query_sums<bf16, head_dim> sums;
  };
  std::mt19937 random(11);
  std::vector<index_t> segments;
  for (index_t segment = 0; index_t(segments.size()) < tokens; ++segment) {
    const index_t length = std::min(index_t(1 + random() % 40), tokens - index_t(segments.size()));
    segments.insert(segments.end(), std::size_t(length), segment);
  }
  std::vector<index_t> of_heads;
  for (index_t h = 0; h < kv_heads; ++h) of_heads.insert(of_heads.end(), segments.begin(), segments.end());
  std::vector<float> frequencies;
  for (int d = 0; d < head_dim / 2; ++d) frequencies.push_back(std::pow(500'000.0f, -2.0f * float(d) / head_dim));
  const int sets = sets_of_rows();
  const bf16* pool = random_rows(elements * 2 * std::size_t(sets) + std::size_t(1024) * q_heads * head_dim);
  const auto queries = [&](index_t count) {
    return nhd_rows<const bf16>(pool + elements * 2 * std::size_t(sets), count, q_heads, head_dim);
  };
  const auto keep = std::make_shared<memory>(
      std::vector<index_t>{tokens}, std::vector<index_t>{by_queries ? tokens - window : tokens}, of_heads,
      std::size_t(1), op.workspace_bytes(), cuda::query_sums<bf16, head_dim>(1, q_heads, frequencies));
  if constexpr (retain_type::observed == observes::statistics) {
    keep->sums.add(0, queries(1024), 0, method.retain.scorer.sinks, stream());
    const query_statistics seen = keep->sums.statistics(0, stream());
    cuda::check(cudaMemcpy(keep->statistics.data(), &seen, sizeof seen, cudaMemcpyHostToDevice), "cudaMemcpy");
    cuda::check(cudaDeviceSynchronize(), "sums over queries");
  }
  prepared made;
  made.bytes = row_bytes;
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    choose_problem<view_type, bf16> problem;
    problem.view = layer_rows(pool, i % sets, keep->length.data());
    problem.layers = 32;
    if (by_queries) problem.q = queries(window);
    problem.q.heads = q_heads;
    problem.first_position = keep->first.data();
    problem.segments = {keep->segments.data(), 0, tokens};
    problem.statistics = keep->statistics.data();
    problem.rope_frequencies = keep->sums.frequencies();
    op.run(policy, problem, keep->workspace.data(), stream());
  });
  return made;
}

/// A layer's sums over the queries of a chunk of 2,048 tokens.
prepared summed_queries() {
  constexpr index_t chunk = 2048;
  const std::vector<float> frequencies(head_dim / 2, 0.5f);
  const auto keep = std::make_shared<cuda::query_sums<bf16, head_dim>>(1, q_heads, frequencies);
  const bf16* pool = random_rows(std::size_t(chunk) * q_heads * head_dim);
  keep->statistics(0, stream());
  prepared made;
  made.bytes = double(chunk) * q_heads * head_dim * sizeof(bf16);
  made.flops = double(chunk) * q_heads * head_dim * head_dim;  // half of the products, two operations each, in double
  made.keep = keep;
  made.graph = std::make_unique<replay>(launches(made.bytes, 1), [&](int) {
    keep->add(0, nhd_rows<const bf16>(pool, chunk, q_heads, head_dim), 0, 0, stream());
  });
  return made;
}

const int registered = [] {
  add("contents/128K/knorm", [] { return stored_score<cuda::score_contents<view_type, key_norm>, key_norm>(1); });
  add("contents/128K/keydiff",
      [] { return stored_score<cuda::score_contents<view_type, key_difference>, key_difference>(2); });
  add("contents/128K/criticalkv",
      [] { return stored_score<cuda::score_contents<view_type, value_norm>, value_norm>(1); });
  add("contents/128K/lagkv", [] { return stored_score<cuda::score_lagged<view_type, lag_relative>, lag_relative>(2); });
  add("query_sums/2K", summed_queries);
  add("choose/128K/snapkv", choice<snapkv<bf16, head_dim>>);
  add("choose/128K/sablock", choice<sablock<bf16, head_dim>>);
  add("choose/128K/expected_attention", choice<expected_attention<bf16, head_dim>>);
  return 0;
}();

}  // namespace
}  // namespace gpu_bench::of_choosing
