// One set of tokens for a model on the device: the bits of the CPU's sums and its choice.
#include <bit>
#include <cmath>
#include <vector>

#include <tessera/backend/cpu/choose/model_scores.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scope/per_head.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "backend/cuda/device.hpp"
#include "support/kv_tensor.hpp"
#include "support/random.hpp"
#include "tessera/backend/cuda/choose/model_scores.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

using stage = retain<observation_window, uniform, top_tokens, per_head>;
using lists = std::vector<std::vector<index_t>>;

lists rows_of(const selection_view& chosen, index_t rows) {
  cuda::check(cudaDeviceSynchronize(), "model_scores");
  const auto counts = cuda::downloaded(chosen.counts, std::size_t(rows));
  lists all;
  for (index_t r = 0; r < rows; ++r)
    all.push_back(cuda::downloaded(chosen.indices + r * chosen.row_stride, std::size_t(counts[std::size_t(r)])));
  return all;
}

std::vector<unsigned> bits_of(const float* values, index_t count) {
  std::vector<unsigned> bits;
  for (index_t i = 0; i < count; ++i)
    bits.push_back(std::isnan(values[i]) ? 0x7fc00000u : std::bit_cast<unsigned>(values[i]));
  return bits;
}

template <over_heads Join>
void compare_sums() {
  support::rng random(521);
  for (const int i : gpu_test::scaled(cases(80), 8)) {
    const index_t sequences = draw(1, 3), heads = draw(1, 5), layers = draw(1, 4),
                  capacity = i % 5 ? draw(1, 300) : draw(1, gpu_test::scaled(60'000, 3'000));
    std::vector<index_t> lengths, tails, budgets;
    std::vector<cpu::model_scores<Join>> expected(static_cast<std::size_t>(sequences));
    for (index_t b = 0; b < sequences; ++b) {
      lengths.push_back(random.pick({0, 1, capacity, random.between(0, capacity)}));
      tails.push_back(random.between(0, 12));
      budgets.push_back(random.between(1, capacity + 20));
      expected[std::size_t(b)].begin(lengths.back());
    }
    stage policy;
    policy.scorer.pool = random.pick({1, 3, 7});
    policy.budget.tokens = random.between(1, capacity);
    const bool by_sequence = i % 2;
    const buffer<index_t> dlengths(lengths), dtails(tails), dbudgets(budgets);
    buffer<float> sums(std::size_t(sequences * capacity));
    cuda::model_scores<stage, Join> all(policy, sequences + 1, capacity, capacity, cuda::device_info::current());
    all.begin();
    for (index_t layer = 0; layer < layers; ++layer) {
      std::vector<float> scores;
      for (index_t s = 0; s < sequences * heads * capacity; ++s)
        scores.push_back(random.chance(0.02) ? std::nanf("") : random.chance(0.5) ? random.normal() : 0.25f);
      const buffer<float> dscores(scores);
      cuda::score_rows rows;
      rows.scores = dscores.data;
      rows.row_stride = capacity;
      rows.sequences = sequences;
      rows.kv_heads = heads;
      rows.lengths = dlengths.data;
      rows.length_strides = {1, 0};
      rows.tails = dtails.data;
      if (by_sequence) rows.budgets = dbudgets.data;
      all.add(rows, sums.data, nullptr);
      for (index_t b = 0; b < sequences; ++b) {
        std::vector<offset_t> offsets;
        for (index_t h = 0; h < heads; ++h) offsets.push_back(offset_t(b * heads + h) * capacity);
        const std::vector<index_t> tokens(std::size_t(heads), lengths[std::size_t(b)]);
        layer_scores of;
        of.kv_heads = heads;
        of.protected_tail = tails[std::size_t(b)];
        of.tokens = tokens.data();
        of.offsets = offsets.data();
        of.scores = scores.data();
        expected[std::size_t(b)].add(of);
      }
      cuda::check(cudaDeviceSynchronize(), "model_scores");
    }
    CAPTURE(i, sequences, heads, layers, capacity, policy.scorer.pool, policy.budget.tokens, by_sequence);
    REQUIRE(all.layers() == layers);
    const std::vector<float> got = sums.get();
    buffer<unsigned char> workspace(all.workspace_bytes());
    workspace.fill(0xff);
    const lists chosen = rows_of(all.choose(policy, sums.data, workspace.data, nullptr), sequences);
    for (index_t b = 0; b < sequences; ++b) {
      const auto& one = expected[std::size_t(b)];
      REQUIRE(bits_of(got.data() + offset_t(b) * capacity, one.tokens()) == bits_of(one.scores(), one.tokens()));
      stage own = policy;
      if (by_sequence) own.budget.tokens = budgets[std::size_t(b)];
      selection kept;
      cpu::retain_workspace memory;
      one.choose(own, kept, memory);
      REQUIRE(chosen[std::size_t(b)] == std::vector<index_t>(kept.row(0), kept.row(0) + kept.counts[0]));
    }
  }
}

}  // namespace

TEST_CASE("scores of layers add up on the device to the CPU's bits, and choose what they choose there", "[gpu]") {
  if (gpu_missing()) return;
  compare_sums<over_heads::sum>();
  compare_sums<over_heads::maximum>();
}

TEST_CASE("a layer scored without a choice, added and chosen from is a layer of which one set is chosen", "[gpu]") {
  if (gpu_missing()) return;
  constexpr int dim = 64;
  using one_set = retain<observation_window, uniform, top_tokens, per_layer<over_heads::sum>>;
  using view_type = kv_view<const bf16, dim>;
  support::rng random(522);
  const auto device = cuda::device_info::current();
  for (const int i : gpu_test::scaled(cases(30), 4)) {
    const index_t sequences = draw(1, 3), heads = draw(1, 3), group = draw(1, 4), window = draw(1, 32),
                  tokens = draw(window, 900);
    const support::kv_tensor<bf16, dim> kv(random, sequences, heads,
                                           std::vector<index_t>(std::size_t(sequences * heads), tokens));
    std::vector<bf16> q;
    for (const float x : support::normals(random, std::size_t(sequences * window * heads * group * dim)))
      q.push_back(bf16(x));
    const buffer<bf16> dk(kv.k), dv(kv.v), dq(q);
    const buffer<index_t> dlengths(kv.lengths), first(std::vector<index_t>(std::size_t(sequences), tokens - window));
    choose_problem<view_type> problem;
    problem.view = kv.view();
    problem.view.k = dk.data, problem.view.v = dv.data, problem.view.lengths = dlengths.data;
    problem.q = nhd_rows<const bf16>(dq.data, window, heads * group, dim, sequences);
    problem.first_position = first.data;
    one_set policy;
    policy.scorer.window = window, policy.scorer.pool = random.pick({1, 7});
    policy.budget.tokens = random.between(window, tokens);
    const cuda::choose_limits limits{sequences, heads, heads * group, window, tokens, 0};
    const cuda::score_and_choose<view_type, one_set> op(policy, limits, device);
    buffer<unsigned char> workspace(op.workspace_bytes());
    const lists expected = rows_of(op.run(policy, problem, workspace.data, nullptr), sequences * heads);
    cuda::model_scores<one_set> all(policy, sequences, tokens, tokens, device);
    buffer<unsigned char> memory(all.workspace_bytes());
    buffer<float> sums(std::size_t(sequences * tokens));
    all.begin();
    all.add(op.score(policy, problem, workspace.data, nullptr), sums.data, nullptr);
    const lists got = rows_of(all.choose(policy, sums.data, memory.data, nullptr), sequences);
    for (index_t b = 0; b < sequences; ++b) REQUIRE(got[std::size_t(b)] == expected[std::size_t(b * heads)]);
  }
}

TEST_CASE("scores of a model on the device say what they take, and a refused layer adds nothing", "[gpu]") {
  if (gpu_missing()) return;
  stage policy;
  policy.budget.tokens = 20;
  const auto device = cuda::device_info::current();
  cuda::model_scores<stage> all(policy, 2, 30, 10, device);
  const buffer<float> scores(std::vector<float>(60, 1.0f));
  const buffer<index_t> lengths(std::vector<index_t>{30, 30});
  buffer<float> sums(60);
  buffer<unsigned char> workspace(all.workspace_bytes());
  cuda::score_rows rows;
  rows.scores = scores.data, rows.row_stride = 30;
  rows.sequences = 2, rows.kv_heads = 1;
  rows.lengths = lengths.data, rows.length_strides = {1, 0};
  rows.tail = 4;
  CHECK_THROWS_WITH(all.choose(policy, sums.data, workspace.data, nullptr),
                    contains("layers of the scores is 0; expected at least 1; "));
  all.add(rows, sums.data, nullptr);
  rows.sequences = 3;
  CHECK_THROWS_WITH(all.add(rows, sums.data, nullptr), contains("sequences of a layer is 3; expected 1 to 2; "));
  rows.sequences = 1;
  CHECK_THROWS_WITH(all.add(rows, sums.data, nullptr),
                    contains("sequences of a layer is 1; expected 2, as in the layers before; "));
  rows.sequences = 2, rows.tail = 5;
  CHECK_THROWS_WITH(all.add(rows, sums.data, nullptr),
                    contains("newest tokens that stay is 5; expected 4, as in the layers before; "));
  CHECK(all.layers() == 1);
  CHECK(sums.get() == std::vector<float>(60, 1.0f));
  CHECK_THROWS_WITH(all.choose(policy, sums.data, workspace.data, nullptr),
                    contains("tokens that a sequence may keep is 20; expected at most 10; "));
}
