// Windows of 17 to 64 query rows, which products of four warps score where the device has them.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cpu/score/score.hpp"
#include "tessera/backend/cuda/score/score.cuh"
#include "tessera/scorer/newest_queries.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A batch whose keys and queries lie as [sequences, tokens, heads, D], with room of a row more between tokens.
template <class T, int D>
struct wide_batch {
  using view_type = kv_view<const T, D>;
  index_t sequences, heads, group, queries, capacity;
  std::vector<T> k, q;
  std::vector<index_t> lengths, first;

  wide_batch(index_t b, index_t h, index_t g, index_t n_q, index_t n)
      : sequences(b),
        heads(h),
        group(g),
        queries(n_q),
        capacity(n),
        k(normal<T>(std::size_t(b) * std::size_t(n) * std::size_t(h + 1) * D)),
        q(normal<T>(std::size_t(b) * std::size_t(n_q) * std::size_t(h * g) * D, 2)) {
    for (index_t s = 0; s < b; ++s) {
      lengths.push_back(s == 0 ? n : draw(1, n));
      first.push_back(std::max(0, lengths.back() - n_q));
    }
  }
  view_type view(const T* keys, const index_t* length, index_t count) const {
    view_type v;
    v.k = keys;
    v.k_strides = {offset_t(capacity) * (heads + 1) * D, D, offset_t(heads + 1) * D, 1};
    v.sequences = count, v.kv_heads = heads;
    v.lengths = length, v.length_strides = {1, 0};
    return v;
  }
};

/// What the device makes of sequences first .. first + count - 1.
template <class T, int D>
std::vector<float> scores_of(const wide_batch<T, D>& b, index_t from, index_t count,
                             const cuda::attentive_score<kv_view<const T, D>, newest_queries>& op,
                             const std::vector<float>& lse = {}, bool complete = false) {
  const buffer<T> k(b.k), q(b.q);
  const buffer<index_t> lengths(b.lengths), first(b.first);
  const buffer<float> given(lse);
  buffer<float> scores(std::size_t(count * b.heads * b.capacity));
  buffer<unsigned char> memory(op.workspace_bytes());
  memory.fill(0xff);
  scores.fill(0xff);  // a score that a kernel forgets is no number
  const index_t q_heads = b.heads * b.group;
  cuda::score_problem<kv_view<const T, D>> p;
  p.view = b.view(k.data + from * b.view(nullptr, nullptr, 0).k_strides.outer, lengths.data + from, count);
  p.q = nhd_rows<const T>(q.data + offset_t(from) * b.queries * q_heads * D, b.queries, q_heads, D, count);
  p.first_position = first.data + from;
  p.scores = scores.data;
  p.row_stride = b.capacity;
  if (!lse.empty()) p.lse = nhd_rows<const float>(given.data, b.queries, q_heads, 1, count);
  p.lse_complete = complete;
  op.run(p, newest_queries{}, memory.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "scoring");
  std::vector<float> all = scores.get();
  for (index_t r = 0; r < count * b.heads; ++r) {  // what lies behind a row is nobody's
    const index_t tokens = b.lengths[std::size_t(from + r / b.heads)];
    std::fill(all.begin() + offset_t(r) * b.capacity + tokens, all.begin() + offset_t(r + 1) * b.capacity, 0.0f);
  }
  return all;
}

template <class T, int D>
void compare(index_t sequences, index_t heads, index_t group, index_t queries, index_t capacity) {
  CAPTURE(D, sequences, heads, group, queries, capacity);
  const wide_batch<T, D> b(sequences, heads, group, queries, capacity);
  const index_t q_heads = heads * group;
  const cuda::attentive_score<kv_view<const T, D>, newest_queries> op(sequences, heads, q_heads, queries, capacity,
                                                                      cuda::device_info::current());
  const auto together = scores_of(b, 0, sequences, op);
  cpu::executor workers(2);
  cpu::score_workspace<D> workspace;
  int wrong = 0;
  for (index_t s = 0; s < sequences; ++s) {
    CAPTURE(s, b.lengths[std::size_t(s)]);
    // Alone as in the batch, bit for bit.
    const auto alone = scores_of(b, s, 1, op);
    const auto here = together.begin() + offset_t(s) * heads * capacity;
    REQUIRE(same_bits(alone, std::vector<float>(here, here + offset_t(heads) * capacity)));

    const auto view =
        b.view(b.k.data() + s * b.view(nullptr, nullptr, 0).k_strides.outer, &b.lengths[std::size_t(s)], 1);
    const cpu::query_rows<T> rows{
        nhd_rows<const T>(b.q.data() + offset_t(s) * queries * q_heads * D, queries, q_heads, D),
        &b.first[std::size_t(s)]};
    std::vector<float> lse(std::size_t(queries * q_heads)), expected(std::size_t(heads * capacity), 0.0f);
    std::vector<offset_t> offsets;
    for (index_t h = 0; h < heads; ++h) offsets.push_back(offset_t(h) * capacity);
    cpu::row_log_sum_exp(view, rows, logit_rule{}, lse.data(), workspace, workers);
    cpu::accumulate_scores(view, rows, logit_rule{}, newest_queries{}, lse.data(), expected.data(), offsets.data(),
                           workspace, workers);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      wrong += !(std::abs(alone[i] - expected[i]) <= 3e-4f * std::abs(expected[i]) + 2e-6f * float(queries * group));
    }
  }
  REQUIRE(wrong == 0);
}

}  // namespace

TEST_CASE("rows of a window score alone as in a batch, and as on the CPU, in any strides", "[gpu]") {
  if (gpu_missing()) return;
  for (const int i : scaled(cases(12), 3)) {
    const index_t group = index_t(1) << draw(0, 3), queries = draw(16 / group + 1, 64 / group);
    const index_t tokens = i % 3 ? draw(1, scaled(1200, 300)) : draw(1, scaled(6000, 700));
    compare<bf16, 128>(draw(1, 4), draw(1, 3), group, queries, tokens);
    compare<fp16, 64>(draw(1, 4), draw(1, 3), group, queries, tokens);
  }
}

TEST_CASE("64 rows of many lengths", "[gpu]") {
  if (gpu_missing()) return;
  for (const index_t tokens : {1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1023, 1025}) {
    compare<bf16, 128>(2, 2, 4, 16, tokens);
  }
}

TEST_CASE("log-sum-exps that are said to be all there are taken as they stand", "[gpu]") {
  if (gpu_missing()) return;
  for (const index_t queries : {4, 16, 40}) {  // 12, 48 and 120 rows: each kernel
    const wide_batch<bf16, 128> b(1, 2, 3, queries, scaled(3000, 300));
    const cuda::attentive_score<kv_view<const bf16, 128>, newest_queries> op(1, 2, 6, queries, b.capacity,
                                                                             cuda::device_info::current());
    const auto lse = normal<float>(std::size_t(queries) * 6);
    REQUIRE(same_bits(scores_of(b, 0, 1, op, lse, true), scores_of(b, 0, 1, op, lse)));
    REQUIRE_THROWS_WITH(scores_of(b, 0, 1, op, {}, true), contains("lse_complete"));
  }
}
