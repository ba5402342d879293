// A scorer, a budget, a selector, a schedule and a row format that exist in the tests only, in the unchanged cache.
#include "catch.hpp"

#include <algorithm>
#include <numeric>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/runs.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/math/exp.hpp>

#include "support/open_layouts.hpp"
#include "support/open_policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

constexpr int dim = 64;
constexpr index_t q_heads = 4, kv_heads = 2, most = 400;

/// The sum of squared probabilities: tokens that few queries need badly beat those that all need a little.
struct squared_attention {
  static constexpr const char* name = "squared_attention";
  static constexpr observes observed = observes::every_query;
  static constexpr bool comparable_across_heads = false;
  TESSERA_HD float weigh(float logit, float lse) const { return fast_exp(2 * (logit - lse)); }
  index_t protected_tail(index_t) const { return 5; }
  void check(index_t) const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

/// Two thirds of the budget for the first head, four thirds for the second.
struct rising {
  static constexpr const char* name = "rising";
  static constexpr bool compares_heads = false;
  index_t tokens = 30;
  TESSERA_HD index_t share(const head_extent& head) const {
    const index_t own = 2 * tokens * (head.head + 1) / 3;
    return own < head.stored ? own : head.stored;
  }
  TESSERA_HD bool fits(const layer_extent& layer) const { return layer.longest <= 2 * tokens / 3; }
  void check() const {}
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

/// Of every pair of neighbours the one that scores more comes first, best pairs first; then what is left in slot order.
struct better_of_pairs {
  static constexpr const char* name = "better_of_pairs";
  using unit = token_unit;
  index_t select(const float* scores, index_t n, index_t tail, index_t keep, index_t* out, top_k_scratch&) const {
    keep = std::min(keep, n);
    const index_t candidates = n - std::min({tail, keep, n});
    std::vector<index_t> order, rest;
    for (index_t i = 0; i < candidates; i += 2) {
      const bool second = i + 1 < candidates && scores[i + 1] > scores[i];
      order.push_back(second ? i + 1 : i);
      if (i + 1 < candidates) rest.push_back(second ? i : i + 1);
    }
    std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) { return scores[a] > scores[b]; });
    order.insert(order.end(), rest.begin(), rest.end());
    order.resize(std::size_t(keep - (n - candidates)));
    for (index_t i = candidates; i < n; ++i) order.push_back(i);
    std::sort(order.begin(), order.end());
    std::copy(order.begin(), order.end(), out);
    return keep;
  }
  void check() const {}
};

struct selector_parameters : better_of_pairs {
  template <class Self, class Visit>
  static void parameters(Self&, Visit&&) {}
};

template <class Where>
using own =
    recipe<retain<squared_attention, rising, selector_parameters>, stored<support::integer_rows<fp32, dim>, Where>,
           retrieve_all, dense_decode, support::every_few_steps>;

/// The same by its definitions, in double over token lists.
struct simulation {
  struct token {
    index_t position;
    double score;
  };
  std::vector<float> q, k, v;  // [tokens, heads, dim]; K and V as int8 rows hold them
  std::vector<std::vector<token>> heads = std::vector<std::vector<token>>(kv_heads);
  index_t next = 0, steps = 0;

  static void quantise(std::vector<float>& rows) {
    for (std::size_t row = 0; row < rows.size(); row += dim) {
      double largest = 0;
      for (std::size_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(double(rows[row + d])));
      const float scale = float(largest) / 127;
      for (std::size_t d = 0; d < dim; ++d) rows[row + d] = float(std::lround(rows[row + d] / scale)) * scale;
    }
  }

  support::oracle::attended attend(index_t at, index_t q_head) const {
    const index_t head = q_head / (q_heads / kv_heads);
    std::vector<const float*> keys, values;
    std::vector<index_t> positions;
    for (const token& t : heads[std::size_t(head)]) {
      keys.push_back(k.data() + (t.position * kv_heads + head) * dim);
      values.push_back(v.data() + (t.position * kv_heads + head) * dim);
      positions.push_back(t.position);
    }
    return support::oracle::attend(q.data() + (at * q_heads + q_head) * dim, at, keys, values, positions, dim, dim);
  }
  void append(index_t count) {
    for (auto& head : heads) {
      for (index_t t = 0; t < count; ++t) head.push_back({next + t, 0});
    }
    next += count;
  }
  void observe(index_t count) {
    for (index_t at = next - count; at < next; ++at) {
      for (index_t h = 0; h < q_heads; ++h) {
        const auto seen = attend(at, h);
        auto& head = heads[std::size_t(h / (q_heads / kv_heads))];
        for (std::size_t i = 0; i < head.size(); ++i) head[i].score += seen.probabilities[i] * seen.probabilities[i];
      }
    }
  }
  void choose(index_t budget) {
    for (std::size_t h = 0; h < heads.size(); ++h) {
      auto& head = heads[h];
      const std::size_t keep = std::size_t(2 * budget * (index_t(h) + 1) / 3);
      if (head.size() <= keep) continue;
      const std::size_t candidates = head.size() - 5;
      std::vector<std::size_t> winners, losers;
      for (std::size_t i = 0; i < candidates; i += 2) {
        if (i + 1 == candidates) {
          winners.push_back(i);
        } else {
          const bool second = head[i + 1].score > head[i].score;
          winners.push_back(i + (second ? 1 : 0));
          losers.push_back(i + (second ? 0 : 1));
        }
      }
      std::stable_sort(winners.begin(), winners.end(), [&](auto a, auto b) { return head[a].score > head[b].score; });
      winners.insert(winners.end(), losers.begin(), losers.end());
      winners.resize(keep - 5);
      std::sort(winners.begin(), winners.end());
      std::vector<token> kept;
      for (const std::size_t i : winners) kept.push_back(head[i]);
      kept.insert(kept.end(), head.end() - 5, head.end());
      head = kept;
    }
  }
};

template <class Where>
void agrees_with_the_simulation(std::uint64_t seed) {
  support::rng random(seed);
  const auto q = support::normals(random, std::size_t(most * q_heads * dim), 1.5f),
             k = support::normals(random, std::size_t(most * kv_heads * dim)),
             v = support::normals(random, std::size_t(most * kv_heads * dim));
  simulation expected{q, k, v};
  simulation::quantise(expected.k);
  simulation::quantise(expected.v);
  own<Where> policy;
  policy.set_budget(30);
  cache<own<Where>> held({1, q_heads, kv_heads}, policy, std::make_shared<cpu::executor>(2));
  const index_t id = held.open();
  const auto rows = [](const std::vector<float>& from, index_t first, index_t count, index_t heads) {
    return nhd_rows<const float>(from.data() + offset_t(first) * heads * dim, count, heads, dim);
  };
  const auto same_positions = [&] {
    for (index_t h = 0; h < kv_heads; ++h) {
      std::vector<index_t> positions;
      for (const auto& token : expected.heads[std::size_t(h)]) positions.push_back(token.position);
      CAPTURE(h, expected.next);
      REQUIRE(held.positions(0, id, h) == positions);
    }
  };
  for (const index_t prompt : {90, 17, 3}) {
    const index_t first = expected.next;
    held.prefill(0, id, rows(q, first, prompt, q_heads), rows(k, first, prompt, kv_heads),
                 rows(v, first, prompt, kv_heads));
    held.end_prefill(id);
    expected.append(prompt);
    expected.observe(prompt);
    expected.choose(30);
    same_positions();
    for (index_t step = 1; step <= 13; ++step) {
      const index_t count = step % 5 == 0 ? 3 : 1, at = expected.next;
      std::vector<float> out(std::size_t(count * q_heads * dim)), lse(std::size_t(count * q_heads));
      const batch now = held.prepare_step({id}, count);
      REQUIRE(now.evicts_last == (step % 4 == 0));
      held.decode(0, now, rows(q, at, count, q_heads), rows(k, at, count, kv_heads), rows(v, at, count, kv_heads),
                  nhd_rows(out.data(), count, q_heads, dim), nhd_rows(lse.data(), count, q_heads, 1));
      expected.append(count);
      for (index_t t = 0; t < count; ++t) {
        for (index_t h = 0; h < q_heads; ++h) {
          const auto want = expected.attend(at + t, h);
          REQUIRE(support::row_error(out.data() + (t * q_heads + h) * dim, want.out) < 1e-5);
          REQUIRE(support::number_error(lse[std::size_t(t * q_heads + h)], want.lse) < 1e-5);
        }
      }
      expected.observe(count);
      if (step % 4 == 0) expected.choose(30);
      same_positions();
    }
  }
}

}  // namespace

TEST_CASE("policies of every axis that only this file knows run in the cache as their definitions say") {
  agrees_with_the_simulation<runs>(311);
  agrees_with_the_simulation<fixed_pages<16>>(312);
}

TEST_CASE("a step that was prepared and not taken does not move a schedule's clock") {
  own<runs> policy;
  cache<own<runs>> held({1, q_heads, kv_heads}, policy, std::make_shared<cpu::executor>(1));
  support::rng random(313);
  const auto q = support::normals(random, q_heads * dim), k = support::normals(random, kv_heads * dim);
  std::vector<float> out(q_heads * dim);
  const index_t id = held.open();
  for (index_t step = 1; step <= 8; ++step) {
    for (int again = 0; again < 3; ++again) held.prepare_step({id}, 1);
    const batch now = held.prepare_step({id}, 1);
    CHECK(now.evicts_last == (step % 4 == 0));
    held.decode(0, now, nhd_rows<const float>(q.data(), 1, q_heads, dim),
                nhd_rows<const float>(k.data(), 1, kv_heads, dim), nhd_rows<const float>(k.data(), 1, kv_heads, dim),
                nhd_rows(out.data(), 1, q_heads, dim));
  }
}
