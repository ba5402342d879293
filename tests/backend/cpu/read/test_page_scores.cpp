// Paged retrieval against the oracle in double: scores by their selection, masses, ties, NaN.
#include "catch.hpp"

#include <limits>

#include <tessera/backend/cpu/read/extrema/page_index.hpp>
#include <tessera/backend/cpu/read/extrema/page_scores.hpp>
#include <tessera/scorer/chosen_channels.hpp>
#include <tessera/scorer/exact_score.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/selector/tokens_or_pages.hpp>

#include "support/kv_tensor.hpp"
#include "support/page_oracle.hpp"

using namespace tessera;
using support::oracle::estimate;
using support::oracle::page_rules;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using tensor = support::kv_tensor<fp32, dim>;

/// One head's choice by the library.
struct outcome {
  std::vector<index_t> chosen;
  std::vector<float> mass;
  offset_t bytes = 0;
};

struct problem {
  tensor kv;
  index_t group, tokens, head = 0;
  std::vector<float> q;  // [tokens, q_heads, dim]
  logit_rule rule{};
  index_t first = 0;  // position of the first query

  index_t q_heads() const { return group * kv.kv_heads; }
  const float* query(index_t row) const {
    return q.data() + (offset_t(row / group) * q_heads() + head * group + row % group) * dim;
  }

  template <class Scorer>
  outcome run(const Scorer& scorer, selection_unit unit, index_t tail, index_t read) const {
    const auto view = kv.view();
    cpu::page_index<fp32, dim> index;
    index.reset(kv.kv_heads, scorer.page);
    index.extend(view);
    const cpu::query_rows<float> rows{nhd_rows<const float>(q.data(), tokens, q_heads(), dim), &first};
    outcome result;
    result.chosen.assign(std::size_t(kv.length(0, head)) + 1, -7);
    result.mass.assign(std::size_t(group * tokens), -1);
    cpu::page_workspace<dim> memory;
    const auto choice =
        cpu::choose_by_pages(view, 0, head, index.view(), rows, rule, scorer, tokens_or_pages{unit, scorer.page}, tail,
                             read, result.chosen.data(), result.mass.data(), memory);
    REQUIRE(result.chosen[std::size_t(choice.count)] == -7);
    result.chosen.resize(std::size_t(choice.count));
    result.bytes = choice.bytes_read;
    return result;
  }

  oracle::page_scores expected(const page_rules& rules) const {
    std::vector<const float*> queries, keys;
    std::vector<index_t> at, heads, positions;
    for (index_t r = 0; r < group * tokens; ++r) {
      queries.push_back(query(r));
      at.push_back(first + r / group);
      heads.push_back(head * group + r % group);
    }
    for (index_t slot = 0; slot < kv.length(0, head); ++slot) {
      keys.push_back(kv.k_float.data() + kv.row(0, head, slot) * dim);
      positions.push_back(kv.position(0, head, slot));
    }
    return oracle::score_pages(rules, queries, at, heads, keys, positions, dim, rule);
  }
};

problem random_problem(support::rng& random) {
  const index_t kv_heads = random.between(1, 2);
  std::vector<index_t> lengths;
  for (index_t h = 0; h < kv_heads; ++h) {
    lengths.push_back(random.pick({index_t(1), index_t(31), index_t(32), index_t(33), index_t(64), index_t(65),
                                   random.between(1, 40), random.between(1, 200)}));
  }
  problem made{tensor(random, 1, kv_heads, lengths),
               random.pick({1, 1, 2, 3, 4, 8}),
               random.pick({1, 1, 1, 2, 5, 8}),
               0,
               {},
               {},
               0};
  made.head = random.between(0, kv_heads - 1);
  if (random.chance(0.4)) {  // few distinct keys: pages tie
    const auto rows = support::repeated_rows(random, index_t(made.kv.k.size()) / dim, dim, random.between(1, 4));
    std::copy(rows.begin(), rows.end(), made.kv.k.begin());
    made.kv.remember();
  }
  if (random.chance(0.4)) made.kv.scatter_positions(random);
  made.q = support::normals(random, std::size_t(made.tokens * made.q_heads() * dim), random.pick({0.3f, 1.0f, 2.0f}));
  if (random.chance(0.1)) std::fill(made.q.begin(), made.q.begin() + dim, 0.0f);
  made.first = std::max(0, made.kv.newest(0) - made.tokens + 1);
  if (random.chance(0.2)) made.rule.soft_cap = 5;
  if (random.chance(0.2)) made.rule.sliding_window = random.between(1, 80);
  if (random.chance(0.1)) made.rule.scale = 0.2f;
  return made;
}

template <class Scorer>
void agree_with_the_oracle(support::rng& random, const problem& made, const Scorer& scorer, estimate kind,
                           index_t& open) {
  const index_t n = made.kv.length(0, made.head), page = scorer.page;
  const auto unit = random.pick({selection_unit::token, selection_unit::page});
  const index_t read = random.between(1, std::max(1, n)), tail = random.between(0, std::min(read, 10));
  CAPTURE(n, page, scorer.channels, made.group, made.tokens, read, tail, int(unit), int(kind),
          made.rule.sliding_window);
  const auto got = made.run(scorer, unit, tail, read);
  for (std::size_t i = 1; i < got.chosen.size(); ++i) REQUIRE(got.chosen[i] > got.chosen[i - 1]);
  if (n <= read) {
    REQUIRE(index_t(got.chosen.size()) == n);
    REQUIRE(got.bytes == 0);
    return;
  }
  const auto expected = made.expected({kind, page, scorer.channels});
  const auto want = unit == selection_unit::token ? oracle::top_tokens(expected.scores, tail, read)
                                                  : oracle::top_pages(expected.scores, tail, read, page);
  const auto verdict = oracle::compare_choices(expected, want, got.chosen, unit == selection_unit::token ? 1 : page);
  REQUIRE(verdict != oracle::agreement::wrong);
  const bool ambiguous = expected.ambiguous || verdict == oracle::agreement::rounding;
  open += ambiguous;
  if (!ambiguous && Scorer::normalised) {
    for (std::size_t r = 0; r < got.mass.size(); ++r) {
      double mass = 0;
      for (const index_t slot : want) mass += expected.probabilities[r][std::size_t(slot)];
      bool speaks = false;
      for (const double p : expected.probabilities[r]) speaks |= p > 0;
      REQUIRE(std::abs(double(got.mass[r]) - (speaks ? mass : 1.0)) < 1e-4);
    }
  }
}

}  // namespace

TEST_CASE("hybrid sparse attention chooses what the oracle chooses") {
  support::rng random(201);
  index_t open = 0;
  for (index_t i = 0; i < support::scaled(5'000); ++i) {
    const auto made = random_problem(random);
    const hybrid_min_max scorer{random.pick({1, 1, 2, 3, 5, 16, 300}), random.pick({1, 7, 16, 31, 64})};
    agree_with_the_oracle(random, made, scorer, estimate::hsa, open);
  }
  CHECK(open < 0.05 * support::scaled(5'000) + 5);
}

TEST_CASE("Quest chooses what the oracle chooses") {
  support::rng random(202);
  index_t open = 0;
  for (index_t i = 0; i < support::scaled(3'500); ++i) {
    const auto made = random_problem(random);
    agree_with_the_oracle(random, made, page_min_max{random.pick({1, 2, 3, 16, 33}), dim}, estimate::quest, open);
  }
  CHECK(open < 0.05 * support::scaled(3'500) + 5);
}

TEST_CASE("SparQ chooses what the oracle chooses, and knows the mass of it") {
  support::rng random(203);
  index_t open = 0;
  for (index_t i = 0; i < support::scaled(3'500); ++i) {
    const auto made = random_problem(random);
    agree_with_the_oracle(random, made, chosen_channels{random.pick({1, 8, 32, 64}), 0}, estimate::sparq, open);
  }
  CHECK(open < 0.05 * support::scaled(3'500) + 5);
}

TEST_CASE("with page 1 and all channels the true probabilities of the group choose") {
  support::rng random(204);
  for (index_t i = 0; i < support::scaled(1'000); ++i) {
    auto made = random_problem(random);
    made.rule.sliding_window = 0;
    const index_t n = made.kv.length(0, made.head), read = random.between(1, n);
    const auto got = made.run(hybrid_min_max{1, dim}, selection_unit::token, 0, read);
    std::vector<double> sums(std::size_t(n), 0.0);
    for (index_t r = 0; r < made.group * made.tokens; ++r) {
      const auto row = made.kv.attend(made.query(r), made.first + r / made.group, 0,
                                      made.head * made.group + r % made.group, made.group, made.rule);
      for (std::size_t slot = 0; slot < sums.size(); ++slot) sums[slot] += row.probabilities[slot];
    }
    const auto want = oracle::top_k(sums, read);
    if (got.chosen != want) {
      double got_mass = 0, want_mass = 0;
      for (const index_t slot : got.chosen) got_mass += sums[std::size_t(slot)];
      for (const index_t slot : want) want_mass += sums[std::size_t(slot)];
      REQUIRE(got_mass == Approx(want_mass).epsilon(1e-5));
    }
  }
}

TEST_CASE("a group's page is read on the side of its sum of q, and zero takes the smaller values") {
  support::rng random(205);
  problem made{tensor(random, 1, 1, {4}), 2, 1, 0, std::vector<float>(2 * dim, 0.0f), {}, 3};
  std::fill(made.kv.k.begin(), made.kv.k.end(), 0.0f);
  // Channel 0: pages (-3, 1) and (-1, 2). The heads disagree, 2 and -1: the sum is 1, the larger values count for both.
  const float channel[] = {-3, 1, -1, 2};
  for (int slot = 0; slot < 4; ++slot) made.kv.k[std::size_t(slot * dim)] = channel[slot];
  made.kv.remember();
  made.q[0] = 2;
  made.q[dim] = -1;
  // Only channel 0 counts. Head 0 prefers page 1 (2 > 1), head 1 page 0; head 0 is the stronger.
  CHECK(made.run(hybrid_min_max{2, 1}, selection_unit::page, 0, 2).chosen == std::vector<index_t>{2, 3});
  // A sum of exactly 0: the smaller values, -3 and -1. Softmaxes of 1 / sqrt(64) scale: both heads mirror each other.
  made.q[dim] = -2;
  const auto tie = made.expected({estimate::hsa, 2, 1});
  CHECK(tie.scores[0] == Approx(tie.scores[2]));
  made.q[0] = 0;
  made.q[dim] = 0;
  CHECK(made.run(hybrid_min_max{2, 1}, selection_unit::page, 0, 2).chosen == std::vector<index_t>{0, 1});
}

TEST_CASE("the cut inside a page keeps its lower slots") {
  support::rng random(206);
  problem made{tensor(random, 1, 1, {9}), 1, 1, 0, support::normals(random, dim), {}, 8};
  const auto pages = made.run(hybrid_min_max{3, dim}, selection_unit::page, 0, 3);
  REQUIRE(pages.chosen.size() == 3);
  for (const index_t read : {1, 2, 3}) {
    const auto cut = made.run(hybrid_min_max{3, dim}, selection_unit::token, 0, read);
    CHECK(cut.chosen == std::vector<index_t>(pages.chosen.begin(), pages.chosen.begin() + read));
  }
  // A short last page counts its real slots.
  problem eight{tensor(random, 1, 1, {8}), 1, 1, 0, support::normals(random, dim), {}, 7};
  for (int d = 0; d < dim; ++d) eight.kv.k[std::size_t(7 * dim + d)] = 9 * eight.q[std::size_t(d)];
  eight.kv.remember();
  CHECK(eight.run(hybrid_min_max{3, dim}, selection_unit::page, 0, 3).chosen == std::vector<index_t>{6, 7});
}

TEST_CASE("keys that are not numbers leave other slots' scores as they are, and queries other heads'") {
  support::rng random(207);
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  for (index_t i = 0; i < support::scaled(500); ++i) {
    auto made = random_problem(random);
    index_t open = 0;
    const index_t n = made.kv.length(0, made.head);
    for (index_t bad = random.between(1, 3); bad > 0; --bad) {
      const std::size_t at = made.kv.row(0, made.head, random.between(0, n - 1)) * dim;
      const index_t from = random.between(0, dim - 1), to = random.chance(0.5) ? dim : from + 1;
      std::fill(made.kv.k.begin() + offset_t(at) + from, made.kv.k.begin() + offset_t(at) + to,
                random.pick({nan, infinity, -infinity}));
    }
    made.kv.remember();
    if (random.chance(0.3) && made.group > 1) made.q[std::size_t(random.between(0, index_t(made.q.size()) - 1))] = nan;
    agree_with_the_oracle(random, made, hybrid_min_max{random.pick({1, 2, 5}), random.pick({8, 64})}, estimate::hsa,
                          open);
    agree_with_the_oracle(random, made, page_min_max{random.pick({1, 2, 5}), dim}, estimate::quest, open);
  }
  // A page of two with one key that is no number scores by the other; a page of nothing else comes last.
  problem made{tensor(random, 1, 1, {6}), 1, 1, 0, std::vector<float>(dim, 1.0f), {}, 5};
  for (int slot = 0; slot < 6; ++slot) std::fill_n(made.kv.k.begin() + slot * dim, dim, slot == 0 ? 5.0f : -1.0f);
  std::fill_n(made.kv.k.begin() + dim, dim, nan);
  std::fill_n(made.kv.k.begin() + 2 * dim, 2 * dim, nan);
  made.kv.remember();
  for (const auto unit : {selection_unit::token, selection_unit::page}) {
    CHECK(made.run(hybrid_min_max{2, dim}, unit, 0, 2).chosen == std::vector<index_t>{0, 1});
    CHECK(made.run(page_min_max{2, dim}, unit, 0, 4).chosen == std::vector<index_t>{0, 1, 4, 5});
  }
}

TEST_CASE("the bytes of an estimate are those of its pages, sides and channels") {
  support::rng random(208);
  problem made{tensor(random, 1, 1, {100}), 1, 1, 0, support::normals(random, dim), {}, 99};
  CHECK(made.run(hybrid_min_max{3, 20}, selection_unit::token, 0, 10).bytes == 34 * 20 * 4);
  CHECK(made.run(hybrid_min_max{1, 20}, selection_unit::token, 0, 10).bytes == 100 * 20 * 4);
  CHECK(made.run(page_min_max{16, dim}, selection_unit::page, 0, 16).bytes == 7 * dim * 4);
  CHECK(made.run(chosen_channels{8, 0}, selection_unit::token, 4, 10).bytes == 100 * 8 * 4);
  CHECK(made.run(chosen_channels{8, 0}, selection_unit::token, 4, 100).bytes == 0);
  // Two heads of opposite queries: Quest reads both sides of every channel, the group's sign is one.
  problem opposed{tensor(random, 1, 1, {100}), 2, 1, 0, support::normals(random, 2 * dim), {}, 99};
  for (int d = 0; d < dim; ++d) opposed.q[std::size_t(dim + d)] = -opposed.q[std::size_t(d)];
  CHECK(opposed.run(page_min_max{16, dim}, selection_unit::page, 0, 16).bytes == 7 * dim * 4 * 2);
  CHECK(opposed.run(hybrid_min_max{16, dim}, selection_unit::page, 0, 16).bytes == 7 * dim * 4);
}
