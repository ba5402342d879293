// choose_kept on the device, with policies that exist only in the tests, against the CPU and a definition in double.
#include <set>

#include "backend/cuda/device.hpp"
#include "backend/cuda/open_policies.hpp"
#include "tessera/backend/cpu/choose/retain.hpp"
#include "tessera/backend/cuda/choose/retain.cuh"
#include "tessera/budget/uniform.hpp"
#include "tessera/scorer/accumulated_attention.hpp"
#include "tessera/selector/top_tokens.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

/// A layer of a batch: scores that are multiples of 1/4, so that ties are frequent and halves exact.
struct layer_case {
  int sequences, heads, capacity;
  std::vector<float> scores;
  std::vector<index_t> lengths, tails, budgets;

  layer_case(int b, int h, int n) : sequences(b), heads(h), capacity(n), scores(std::size_t(b * h * n)) {
    for (auto& x : scores) x = draw(0, 30) == 0 ? NAN : float(draw(-8, 40)) * 0.25f;
    for (int r = 0; r < b * h; ++r) lengths.push_back(draw(1, n));
    for (int s = 0; s < b; ++s) tails.push_back(draw(0, 12)), budgets.push_back(draw(1, n));
  }
};

using lists = std::vector<std::vector<index_t>>;

template <class Policy>
lists on_device(const layer_case& c, const Policy& policy, bool by_sequence) {
  const buffer<float> scores(c.scores);
  const buffer<index_t> lengths(c.lengths), tails(c.tails), budgets(c.budgets);
  cuda::score_rows in;
  in.scores = scores.data;
  in.row_stride = c.capacity;
  in.sequences = c.sequences;
  in.kv_heads = c.heads;
  in.lengths = lengths.data;
  in.length_strides = {c.heads, 1};
  in.tails = tails.data;
  if (by_sequence) in.budgets = budgets.data;
  // Made for a larger batch than comes.
  const cuda::choose_kept<Policy> op(policy, c.sequences + 2, c.heads, c.capacity, c.capacity,
                                     cuda::device_info::current());
  buffer<unsigned char> workspace(op.workspace_bytes());
  workspace.fill(0xff);
  const selection_view chosen = op.run(policy, in, 1, 4, workspace.data, nullptr);
  cuda::check(cudaDeviceSynchronize(), "choose_kept");
  lists rows;
  for (int r = 0; r < c.sequences * c.heads; ++r) {
    index_t count = 0;
    cuda::check(cudaMemcpy(&count, chosen.counts + r, sizeof count, cudaMemcpyDeviceToHost), "cudaMemcpy");
    rows.emplace_back(std::size_t(count));
    cuda::check(cudaMemcpy(rows.back().data(), chosen.indices + r * chosen.row_stride,
                           std::size_t(count) * sizeof(index_t), cudaMemcpyDeviceToHost),
                "cudaMemcpy");
  }
  return rows;
}

template <class Policy>
lists on_host(const layer_case& c, Policy policy, bool by_sequence) {
  lists rows;
  for (int b = 0; b < c.sequences; ++b) {
    std::vector<offset_t> offsets;
    for (int h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
    layer_scores of;
    of.layer = 1;
    of.layers = 4;
    of.kv_heads = c.heads;
    of.protected_tail = c.tails[std::size_t(b)];
    of.tokens = c.lengths.data() + b * c.heads;
    of.offsets = offsets.data();
    of.scores = c.scores.data();
    if (by_sequence) policy.budget.tokens = c.budgets[std::size_t(b)];
    selection kept;
    cpu::retain_workspace workspace;
    cpu::choose_kept(policy, of, kept, workspace);
    for (int h = 0; h < c.heads; ++h) rows.emplace_back(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
  }
  return rows;
}

/// The definition, for the policies of this file: whole sorts of doubles, no counting.
template <class Policy>
lists by_definition(const layer_case& c, const Policy& policy, bool by_sequence) {
  using budget = typename Policy::budget_type;
  using selector = typename Policy::selector_type;
  const double last = -std::numeric_limits<double>::infinity();
  lists rows;
  for (int b = 0; b < c.sequences; ++b) {
    const index_t tokens = by_sequence ? c.budgets[std::size_t(b)] : policy.budget.tokens;
    const index_t tail = c.tails[std::size_t(b)], base = std::max(0, tokens - tail);
    const index_t* length = c.lengths.data() + b * c.heads;
    std::vector<std::vector<double>> finished;
    for (int h = 0; h < c.heads; ++h) {
      const float* raw = c.scores.data() + std::size_t(b * c.heads + h) * std::size_t(c.capacity);
      const index_t n = std::max(0, length[h] - tail);
      finished.emplace_back();
      for (index_t i = 0; i < n; ++i) {
        double score = raw[i];
        if (device_scorer<typename Policy::scorer_type> && slot_finishing_scorer<typename Policy::scorer_type>) {
          for (const index_t j : {i - 1, i + 1}) {
            if (j >= 0 && j < n && raw[j] / 2.0 > (std::isnan(score) ? last : score) && !std::isnan(raw[i])) {
              score = raw[j] / 2.0;
            }
          }
        }
        finished.back().push_back(std::isnan(score) ? last : score);
      }
    }
    std::vector<std::tuple<double, int, index_t>> all;  // best first: score, then head, then slot
    for (int h = 0; h < c.heads; ++h) {
      for (index_t i = 0; i < index_t(finished[std::size_t(h)].size()); ++i) {
        all.emplace_back(-finished[std::size_t(h)][std::size_t(i)], h, i);
      }
    }
    std::sort(all.begin(), all.end());
    const bool whole = *std::max_element(length, length + c.heads) <= tokens;
    bool short_enough = true;
    for (int h = 0; h < c.heads; ++h) short_enough &= std::max(0, length[h] - tail) <= base;
    for (int h = 0; h < c.heads; ++h) {
      const auto& scores = finished[std::size_t(h)];
      index_t count = std::min(tokens, length[h]);
      if constexpr (std::is_same_v<budget, every_other_head>) {
        if (h % 2 == 0) count = length[h];
      } else if constexpr (std::is_same_v<budget, half_won>) {
        index_t won = 0;
        for (std::size_t i = 0; i < std::min(all.size(), std::size_t(c.heads * base)); ++i)
          won += std::get<1>(all[i]) == h;
        count = short_enough ? length[h] : tail + (won + base) / 2;
      }
      if (whole) count = length[h];
      count = std::min(std::max(count, std::min(tail, length[h])), length[h]);
      const index_t newest = std::min(tail, count), room = count - newest, n = length[h] - newest;
      std::set<index_t> kept;
      if constexpr (std::is_same_v<selector, spaced>) {
        for (index_t i = 0; i < room; ++i) kept.insert(index_t(offset_t(i) * n / room));
      } else {
        std::vector<index_t> order(scores.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](index_t x, index_t y) { return scores[std::size_t(x)] > scores[std::size_t(y)]; });
        for (index_t i = 0; i < room; ++i) kept.insert(n < length[h] - tail || whole ? i : order[std::size_t(i)]);
      }
      for (index_t i = 0; i < newest; ++i) kept.insert(length[h] - 1 - i);
      rows.emplace_back(kept.begin(), kept.end());
    }
  }
  return rows;
}

template <class Scorer, class Budget, class Selector>
void compare(bool defined = true) {
  for (const int i : scaled(cases(40), 6)) {
    const layer_case c(draw(1, 4), draw(1, 5), i % 4 ? draw(1, 200) : draw(1, scaled(9000, 600)));
    for (const bool by_sequence : {false, true}) {
      CAPTURE(Scorer::name, Budget::name, Selector::name, c.sequences, c.heads, c.capacity, by_sequence, i);
      retain<Scorer, Budget, Selector> policy;
      policy.budget.tokens = draw(1, c.capacity);
      const lists got = on_device(c, policy, by_sequence);
      REQUIRE(got == on_host(c, policy, by_sequence));
      if (defined) REQUIRE(got == by_definition(c, policy, by_sequence));
    }
  }
}

}  // namespace

TEST_CASE("a scorer's last pass that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare<spread_window, uniform, top_tokens>();
}
TEST_CASE("a budget by head that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare<accumulated_attention, every_other_head, top_tokens>();
  compare<spread_window, every_other_head, spaced>();
}
TEST_CASE("a budget of winners that a test defines is run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare<accumulated_attention, half_won, top_tokens>();
  compare<spread_window, half_won, top_tokens>();
}
TEST_CASE("selectors that a test defines are run on the device", "[gpu]") {
  if (gpu_missing()) return;
  compare<accumulated_attention, uniform, spaced>();
  compare<spread_window, uniform, pairs>(false);  // against the CPU: top_blocks has its own definition
}
