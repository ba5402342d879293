// choose_kept on raw scores full of exact ties: compared exactly, not modulo rounding.
#include "catch.hpp"

#include <numeric>

#include <tessera/backend/cpu/choose/retain.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/pyramid.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_blocks.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;
namespace oracle = support::oracle;

namespace {

/// The heads' raw scores: multiples of 1/4, so that every sum and maximum is exact.
std::vector<std::vector<float>> random_heads(support::rng& random) {
  std::vector<std::vector<float>> heads;
  const bool even = random.chance(0.5);
  const index_t length = random.between(1, 100);
  for (index_t h = random.between(1, 5); h > 0; --h) {
    heads.push_back(support::tied_scores(random, even ? length : random.between(1, 100), random.pick({1, 2, 5, 50})));
    for (auto& score : heads.back()) score = random.chance(0.02) ? std::nanf("") : score;
  }
  return heads;
}

std::vector<std::vector<index_t>> rows_of(const selection& kept) {
  std::vector<std::vector<index_t>> rows;
  for (index_t r = 0; r < kept.rows(); ++r) rows.emplace_back(kept.row(r), kept.row(r) + kept.counts[std::size_t(r)]);
  return rows;
}

template <class Policy, class Counts, class Select>
void compare_with_definition(const Policy& policy, const std::vector<std::vector<float>>& heads, index_t tail,
                             index_t layer, index_t layers, Counts&& counts_of, Select&& select) {
  const support::owned_scores raw(heads);
  selection kept;
  cpu::retain_workspace workspace;
  cpu::choose_kept(policy, raw.view(tail, layer, layers), kept, workspace);

  std::vector<std::vector<index_t>> expected;
  if (*std::max_element(raw.tokens.begin(), raw.tokens.end()) <= policy.budget.tokens) {
    for (const index_t n : raw.tokens) {
      expected.emplace_back(std::size_t(n));
      std::iota(expected.back().begin(), expected.back().end(), 0);
    }
  } else {
    std::vector<std::vector<double>> candidates;
    for (const auto& head : heads) {
      const std::vector<double> before(head.begin(), head.end() - std::min(tail, index_t(head.size())));
      if constexpr (requires { policy.scorer.pool; }) {
        candidates.push_back(policy.scorer.pool_kind == pooling::max
                                 ? oracle::max_pool(before, policy.scorer.pool)
                                 : oracle::average_pool(before, policy.scorer.pool));
      } else {
        candidates.push_back(before);
      }
    }
    const auto counts = counts_of(candidates, raw.tokens);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      auto scores = candidates[h];
      scores.resize(heads[h].size(), 0.0);
      expected.push_back(select(scores, std::clamp(counts[h], std::min(tail, raw.tokens[h]), raw.tokens[h])));
    }
  }
  REQUIRE(rows_of(kept) == expected);
}

}  // namespace

TEST_CASE("choose_kept under uniform, pyramid and adaptive budgets keeps exactly what the definitions say") {
  support::rng random(121);
  for (index_t i = 0; i < support::scaled(6'000); ++i) {
    const auto heads = random_heads(random);
    const index_t budget = random.between(1, 60), tail = random.between(0, budget);
    const index_t layers = random.between(1, 8), layer = random.between(0, layers - 1);
    const observation_window scorer{.window = std::max(1, tail),
                                    .pool = random.pick({1, 3, 7, 63}),
                                    .pool_kind = random.chance(0.7) ? pooling::max : pooling::average};
    const auto tokens = [&](const std::vector<double>& scores, index_t keep) {
      return oracle::top_tokens(scores, tail, keep);
    };
    CAPTURE(i, budget, tail, layer, layers, scorer.pool);
    compare_with_definition(
        choosing_stage<observation_window, uniform, top_tokens>{{}, scorer, {.tokens = budget}, {}}, heads, tail, layer,
        layers,
        [&](const auto&, std::vector<index_t> n) {
          for (auto& count : n) count = std::min(count, budget);
          return n;
        },
        tokens);
    const pyramid falling{.tokens = budget, .beta = random.between(1, 25)};
    compare_with_definition(
        choosing_stage<observation_window, pyramid, top_tokens>{{}, scorer, falling, {}}, heads, tail, layer, layers,
        [&](const auto&, std::vector<index_t> n) {
          for (auto& count : n) count = oracle::pyramid_count(layer, layers, budget, falling.beta, tail, count);
          return n;
        },
        tokens);
    const index_t floor = random.pick({0, 200, 500, 1000});
    compare_with_definition(
        choosing_stage<observation_window, adaptive, top_tokens>{
            {}, scorer, {.tokens = budget, .floor = float(floor) / 1000}, {}},
        heads, tail, layer, layers,
        [&](const auto& candidates, const std::vector<index_t>& n) {
          return oracle::adaptive_counts(candidates, n, budget, tail, floor);
        },
        tokens);
  }
}

TEST_CASE("choose_kept in blocks keeps exactly what the definition says") {
  support::rng random(122);
  for (index_t i = 0; i < support::scaled(4'000); ++i) {
    const auto heads = random_heads(random);
    const index_t budget = random.between(1, 60), tail = random.between(0, budget), block = random.pick({1, 2, 5, 16});
    compare_with_definition(
        choosing_stage<accumulated_attention, uniform, top_blocks>{{}, {}, {.tokens = budget}, {.block = block}}, heads,
        tail, 0, 1,
        [&](const auto&, std::vector<index_t> n) {
          for (auto& count : n) count = std::min(count, budget);
          return n;
        },
        [&](const std::vector<double>& scores, index_t keep) { return oracle::top_blocks(scores, tail, keep, block); });
  }
}

TEST_CASE("counts in whole pages choose the best tokens of as many as pages hold") {
  support::rng random(123);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    const support::owned_scores raw(random_heads(random));
    const index_t budget = random.between(1, 60), tail = random.between(0, budget), page = random.pick({2, 8, 16});
    const choosing_stage<accumulated_attention, adaptive, top_tokens> policy{{}, {}, {.tokens = budget}, {}};
    selection loose, kept;
    cpu::retain_workspace workspace;
    cpu::choose_kept(policy, raw.view(tail), loose, workspace);
    cpu::slot_facts beside;
    beside.granularity = page;
    cpu::choose_kept(policy, raw.view(tail), kept, workspace, beside);
    auto counts = loose.counts;
    count_whole_pages(index_t(counts.size()), page, {raw.tokens.data(), 1, nullptr, tail}, counts.data());
    CAPTURE(i, budget, tail, page);
    REQUIRE(kept.counts == counts);
    beside = {};
    beside.counts = counts.data();
    cpu::choose_kept(policy, raw.view(tail), loose, workspace, beside);
    REQUIRE(rows_of(kept) == rows_of(loose));
  }
}

TEST_CASE("choose_kept by hand: a pooled plateau goes to its first tokens, the window stays") {
  const support::owned_scores raw({{0, 0, 9, 0, 0, 1, 0, 0, /*window*/ 0, 0}});
  selection kept;
  cpu::retain_workspace workspace;
  const choosing_stage<observation_window, uniform, top_tokens> policy{{}, {.window = 2, .pool = 3}, {.tokens = 6}, {}};
  cpu::choose_kept(policy, raw.view(2), kept, workspace);
  CHECK(rows_of(kept) == std::vector<std::vector<index_t>>{{1, 2, 3, 4, 8, 9}});
}
