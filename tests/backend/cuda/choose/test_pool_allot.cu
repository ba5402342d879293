// Pooling and budgets on the GPU: the bits and the counts of the CPU.
#include "backend/cuda/device.hpp"
#include "tessera/backend/cpu/score/finish.hpp"
#include "tessera/backend/cuda/choose/allot.cuh"
#include "tessera/backend/cuda/score/pool.cuh"
#include "tessera/budget/adaptive.hpp"
#include "tessera/budget/pyramid.hpp"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/observation_window.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

struct rows_case {
  int sequences, heads, capacity;
  std::vector<float> scores;
  std::vector<index_t> lengths, tails;

  rows_case(int b, int h, int n, int most_tail, bool ties, bool odd) : sequences(b), heads(h), capacity(n) {
    scores = normal<float>(std::size_t(b) * h * n);
    for (auto& x : scores) {
      x = std::exp(x * 3 - 8);
      if (ties) x = float(draw(0, 3)) - 1;
      if (odd && draw(0, 20) == 0) x = draw(0, 2) == 0 ? NAN : (draw(0, 1) ? infinity : -infinity);
      if (odd && draw(0, 20) == 0) x = -0.0f;
    }
    for (int r = 0; r < b * h; ++r) lengths.push_back(draw(0, 6) == 0 ? draw(0, 1) : draw(1, n));
    for (int s = 0; s < b; ++s) tails.push_back(draw(0, most_tail));
  }
  cuda::score_rows device(const buffer<float>& s, const buffer<index_t>& l, const buffer<index_t>& t) const {
    cuda::score_rows rows;
    rows.scores = s.data;
    rows.row_stride = capacity;
    rows.sequences = sequences;
    rows.kv_heads = heads;
    rows.lengths = l.data;
    rows.length_strides = {heads, 1};
    rows.tails = t.data;
    return rows;
  }
};

bool equal_values(float a, float b) { return a == b || (a != a && b != b); }

template <class Scorer>
void compare_finish(const rows_case& c, const Scorer& scorer) {
  buffer<float> scores(c.scores), out(c.scores.size());
  buffer<index_t> lengths(c.lengths), tails(c.tails);
  out.fill(0xff);
  const cuda::finish_scores<Scorer> op(c.sequences, c.heads, c.capacity, cuda::device_info::current());
  op.run(c.device(scores, lengths, tails), scorer, out.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "finish");
  const auto got = out.get();
  std::vector<float> expected(std::size_t(c.capacity));
  host_vector<float> scratch;
  int wrong = 0, touched = 0;
  for (int r = 0; r < c.sequences * c.heads; ++r) {
    const int n = std::max(0, c.lengths[r] - c.tails[r / c.heads]);
    cpu::finished(scorer, c.scores.data() + std::size_t(r) * c.capacity, n, expected.data(), scratch);
    for (int i = 0; i < n; ++i) wrong += !equal_values(expected[i], got[std::size_t(r) * c.capacity + i]);
    for (int i = n; i < c.capacity; ++i) {
      std::uint32_t word;
      std::memcpy(&word, &got[std::size_t(r) * c.capacity + i], 4);
      touched += word != 0xffffffffu;
    }
  }
  REQUIRE(wrong == 0);
  REQUIRE(touched == 0);
}

template <class Budget>
void compare_allot(const rows_case& c, const Budget& of_all, int layer, int layers, bool by_sequence = false) {
  CAPTURE(Budget::name, c.sequences, c.heads, c.capacity, of_all.tokens, by_sequence);
  std::vector<index_t> budgets;
  for (int b = 0; b < c.sequences; ++b) budgets.push_back(by_sequence ? draw(1, c.capacity) : of_all.tokens);
  const buffer<index_t> device_budgets(budgets);
  buffer<float> scores(c.scores);
  buffer<index_t> lengths(c.lengths), tails(c.tails), counts(c.lengths.size());
  const cuda::allot<Budget> op(c.sequences, c.heads, c.capacity, cuda::device_info::current());
  buffer<unsigned char> memory(op.workspace_bytes());
  memory.fill(0xff);
  std::vector<index_t> got, again;
  for (int round = 0; round < 2; ++round) {
    counts.fill(0xff);
    cuda::score_rows in = c.device(scores, lengths, tails);
    if (by_sequence) in.budgets = device_budgets.data;
    op.run(in, of_all, layer, layers, counts.data, memory.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "allot");
    (round ? again : got) = counts.get();
  }
  REQUIRE(got == again);
  for (int b = 0; b < c.sequences; ++b) {
    std::vector<index_t> tokens(c.lengths.begin() + b * c.heads, c.lengths.begin() + (b + 1) * c.heads),
        expected = tokens;
    Budget policy = of_all;
    policy.tokens = budgets[b];
    std::vector<offset_t> offsets;
    for (int h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
    layer_scores of;
    of.layer = layer;
    of.layers = layers;
    of.kv_heads = c.heads;
    of.protected_tail = c.tails[b];
    of.tokens = tokens.data();
    of.offsets = offsets.data();
    of.scores = c.scores.data();
    if (*std::max_element(tokens.begin(), tokens.end()) > policy.tokens) {
      allot_counts(policy, of, expected.data());
      for (int h = 0; h < c.heads; ++h)
        expected[h] = std::clamp(expected[h], std::min(c.tails[b], tokens[h]), tokens[h]);
    }
    REQUIRE(std::vector<index_t>(got.begin() + b * c.heads, got.begin() + (b + 1) * c.heads) == expected);
  }
}

}  // namespace

TEST_CASE("GPU pooling has the CPU's bits", "[gpu]") {
  if (gpu_missing()) return;
  for (const int i : scaled(cases(24), 4)) {
    const rows_case c(draw(1, 3), draw(1, 4), i < 4 ? draw(1, 4) : draw(1, scaled(7000, 1200)), 40, i % 5 == 0,
                      i % 3 == 0);
    for (const int kernel : {1, 3, 7, 2 * draw(0, 127) + 1, 255}) {
      compare_finish(c, observation_window{32, kernel, pooling::max});
      compare_finish(c, observation_window{32, kernel, pooling::average});
    }
  }
}

TEST_CASE("GPU budgets have the CPU's counts", "[gpu]") {
  if (gpu_missing()) return;
  for (const int i : scaled(cases(60), 5)) {
    const rows_case c(draw(1, 4), draw(1, 9), i < 6 ? draw(1, 6) : draw(1, i % 4 ? scaled(900, 400) : 9000),
                      i % 7 ? 32 : 0, i % 5 == 0, i % 3 == 0);
    const int budget = draw(1, std::max(2, c.capacity));
    compare_allot(c, uniform{budget}, 0, 1);
    compare_allot(c, pyramid{budget, draw(1, 20)}, draw(0, 7), 8);
    compare_allot(c, adaptive{budget, draw(0, 10) * 0.1f}, 0, 1);
    compare_allot(c, adaptive{std::max(1, budget / 8), 0.2f}, 0, 1);
    compare_allot(c, uniform{budget}, 0, 1, true);
    compare_allot(c, pyramid{budget, draw(1, 20)}, draw(0, 7), 8, true);
    compare_allot(c, adaptive{budget, draw(0, 10) * 0.1f}, 0, 1, true);
  }
}
