// What earlier choices have settled of a prompt, on the device: found by position, counted by budgets, left alone by selectors.
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/value_norm.hpp>
#include <tessera/scorer/weighted_by.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "backend/cuda/device.hpp"
#include "support/choose_case.hpp"
#include "tessera/backend/cuda/choose/score_and_choose.cuh"

using namespace tessera;
using namespace gpu_test;
using namespace support;

namespace {

/// A batch of which some first slots are settled: what of them is from before the turn, and how much the turn has seen.
struct settled_case : layer_case {
  std::vector<index_t> settled, earlier;
  std::vector<prompt_reach> reach;
  std::vector<double> shares;  // [4 layers, heads]
  std::vector<float> weights;

  settled_case(support::rng& random, index_t b, index_t h, index_t n) : layer_case(random, b, h, n) {
    for (const index_t length : lengths) {
      settled.push_back(random.between(0, length));
      earlier.push_back(random.between(0, settled.back()));
    }
    for (index_t s = 0; s < b; ++s) {
      index_t seen = 0;  // at least what is stored of the turn
      for (index_t i = s * h; i < (s + 1) * h; ++i)
        seen = std::max(seen, lengths[std::size_t(i)] - earlier[std::size_t(i)]);
      const index_t begin = random.between(0, 100);
      reach.push_back({begin, begin + random.between(0, seen), begin + seen + random.between(0, 50)});
    }
    for (index_t i = 0; i < 4 * h; ++i) shares.push_back(random.chance(0.1) ? 1.0 : random.uniform() * 0.9 + 0.01);
    for (std::size_t i = 0; i < scores.size(); ++i) weights.push_back(float(random.between(0, 30)) * 0.125f);
  }
};

template <class Policy>
lists settled_on_host(const settled_case& c, const Policy& policy) {
  lists rows;
  for (index_t b = 0; b < c.sequences; ++b) {
    std::vector<offset_t> offsets;
    for (index_t h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
    layer_scores of;
    of.layer = 1;
    of.layers = 4;
    of.kv_heads = c.heads;
    of.protected_tail = c.tails[std::size_t(b)];
    of.tokens = c.lengths.data() + b * c.heads;
    of.offsets = offsets.data();
    of.scores = c.scores.data();
    of.settled = c.settled.data() + b * c.heads;
    of.earlier = c.earlier.data() + b * c.heads;
    of.prompt_tokens = c.reach[std::size_t(b)].prompt_tokens();
    cpu::slot_facts beside;
    beside.weights = {c.weights.data() + offset_t(b) * c.heads * c.capacity, 0, c.capacity};
    selection kept;
    cpu::retain_workspace workspace;
    cpu::choose_kept(policy, of, kept, workspace, beside);
    for (index_t h = 0; h < c.heads; ++h) rows.emplace_back(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
  }
  return rows;
}

template <class Policy>
lists settled_on_device(const settled_case& c, const Policy& policy) {
  const buffer<float> scores(c.scores), weights(c.weights);
  const buffer<index_t> lengths(c.lengths), tails(c.tails), settled(c.settled), earlier(c.earlier);
  const buffer<prompt_reach> reach(c.reach);
  cuda::score_rows in;
  in.scores = scores.data;
  in.row_stride = c.capacity;
  in.sequences = c.sequences;
  in.kv_heads = c.heads;
  in.lengths = lengths.data;
  in.length_strides = {c.heads, 1};
  in.tails = tails.data;
  in.settled = settled.data;
  in.earlier = earlier.data;
  in.reach = reach.data;
  const cuda::choose_kept<Policy> op(policy, c.sequences + 1, c.heads, c.capacity, c.capacity,
                                     cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  cuda::slot_facts beside;
  beside.weights = weights.data;
  beside.weight_stride = c.capacity;
  const selection_view chosen = op.run(policy, in, 1, 4, workspace.data, nullptr, beside);
  cuda::check(cudaDeviceSynchronize(), "choose_kept");
  lists rows;
  const auto counts = cuda::downloaded(chosen.counts, std::size_t(c.sequences * c.heads));
  for (index_t r = 0; r < c.sequences * c.heads; ++r) {
    rows.push_back(cuda::downloaded(chosen.indices + r * chosen.row_stride, std::size_t(counts[std::size_t(r)])));
  }
  return rows;
}

template <class Scorer, class Budget, class Selector>
void compare_settled() {
  support::rng random(31);
  for (const int i : gpu_test::scaled(cases(60), 6)) {
    const settled_case c(random, draw(1, 4), draw(1, 5), i % 4 ? draw(1, 200) : draw(1, gpu_test::scaled(20'000, 600)));
    retain<Scorer, Budget, Selector> policy;
    policy.budget.tokens = draw(1, c.capacity);
    if constexpr (requires { policy.budget.shares; }) {
      if (i % 3) policy.budget.shares = {c.shares.data(), 4, c.heads};
      if (i % 3 == 0) policy.budget.prompt = draw(policy.budget.tokens, 2 * c.capacity);
    }
    CAPTURE(Scorer::name, Budget::name, Selector::name, c.sequences, c.heads, c.capacity, i);
    const lists got = settled_on_device(c, policy);
    REQUIRE(got == settled_on_host(c, policy));
    for (std::size_t r = 0; r < got.size(); ++r) {  // what is settled stays
      for (index_t slot = 0; slot < c.settled[r]; ++slot) REQUIRE(got[r][std::size_t(slot)] == slot);
    }
  }
}

}  // namespace

TEST_CASE("settled slots stay, and the others compete for what a budget by lengths leaves them", "[gpu]") {
  if (gpu_missing()) return;
  compare_settled<accumulated_attention, calibrated, top_tokens>();
  compare_settled<accumulated_attention, uniform, top_tokens>();
}
TEST_CASE("selectors with a body of their own, and of blocks, see what lies behind settled slots", "[gpu]") {
  if (gpu_missing()) return;
  compare_settled<accumulated_attention, calibrated, spaced>();
  compare_settled<accumulated_attention, calibrated, pairs>();
  compare_settled<spread_accumulated, calibrated, top_tokens>();
}
TEST_CASE("scores behind settled slots are weighted as the CPU weighs them", "[gpu]") {
  if (gpu_missing()) return;
  compare_settled<weighted_by<accumulated_attention, value_norm>, calibrated, top_tokens>();
}

TEST_CASE("settled slots are found by position, as the CPU finds them", "[gpu]") {
  if (gpu_missing()) return;
  using view_type = kv_view<const bf16, 64>;
  support::rng random(32);
  for (const int i : gpu_test::scaled(cases(200), 20)) {
    const index_t sequences = draw(1, 3), heads = draw(1, 4), capacity = i % 5 ? draw(1, 70) : draw(1, 40'000);
    std::vector<index_t> lengths, positions;
    std::vector<prompt_reach> reach;
    for (index_t row = 0; row < sequences * heads; ++row) {
      lengths.push_back(random.pick({0, 1, capacity, random.between(0, capacity)}));
      index_t position = 0;
      for (index_t s = 0; s < capacity; ++s) positions.push_back(position += random.between(1, 3));
    }
    for (index_t b = 0; b < sequences; ++b) {
      const index_t begin = random.between(0, 2 * capacity), open = random.between(begin, 3 * capacity + 2);
      reach.push_back({begin, open, open + 5});
    }
    const auto view_over = [&](const index_t* of_lengths, const index_t* of_positions) {
      view_type view;
      view.sequences = sequences;
      view.kv_heads = heads;
      view.lengths = of_lengths;
      view.length_strides = {heads, 1};
      view.positions = of_positions;
      view.position_strides = {offset_t(heads) * capacity, capacity};
      return view;
    };
    const buffer<index_t> dlengths(lengths), dpositions(positions);
    const buffer<prompt_reach> dreach(reach);
    const bool kept = i % 4 != 0;  // else slot and position coincide
    for (const index_t rows_of_one : {heads, index_t(1)}) {
      buffer<index_t> settled(std::size_t(sequences * rows_of_one)), earlier(settled.count);
      cuda::find_settled(view_over(dlengths.data, kept ? dpositions.data : nullptr), rows_of_one, dreach.data,
                         settled.data, earlier.data, nullptr);
      const view_type host = view_over(lengths.data(), kept ? positions.data() : nullptr);
      const auto got = settled.get(), before = earlier.get();
      for (index_t row = 0; row < sequences * rows_of_one; ++row) {
        const index_t b = row / rows_of_one, h = row % rows_of_one;
        CAPTURE(i, row, lengths[std::size_t(b * heads + h)]);
        REQUIRE(got[std::size_t(row)] == cpu::detail::slots_before(host, b, h, reach[std::size_t(b)].open));
        REQUIRE(before[std::size_t(row)] == cpu::detail::slots_before(host, b, h, reach[std::size_t(b)].begin));
      }
    }
  }
}

TEST_CASE("a table of shares that an operation was not made with is refused", "[gpu]") {
  if (gpu_missing()) return;
  const std::vector<double> one{0.5, 0.25}, other{0.5, 0.25};
  calibrated budget;
  budget.shares = {one.data(), 1, 2};
  const cuda::allot<calibrated> op(1, 2, 16, cuda::device_info::current(), budget);
  const buffer<index_t> lengths(std::vector<index_t>{10, 11});
  buffer<index_t> counts(2);
  cuda::score_rows in;
  in.sequences = 1;
  in.kv_heads = 2;
  in.lengths = lengths.data;
  in.length_strides = {2, 1};
  op.run(in, budget, 0, 1, counts.data, nullptr, nullptr);
  REQUIRE(counts.get() == std::vector<index_t>{5, 3});
  budget.shares.data = other.data();
  REQUIRE_THROWS_WITH(op.run(in, budget, 0, 1, counts.data, nullptr, nullptr), contains("table of the budget"));
}
