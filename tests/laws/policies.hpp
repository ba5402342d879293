// The laws of every axis: one body per concept. A policy's own test calls the body of its concept.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include <tessera/backend/cpu/score/finish.hpp>
#include <tessera/concepts/budget.hpp>
#include <tessera/concepts/schedule.hpp>
#include <tessera/concepts/scorer.hpp>
#include <tessera/concepts/selector.hpp>
#include <tessera/core/error.hpp>

#include "catch.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

namespace support {

using namespace tessera;

inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

// --- selector ---

template <selector S>
std::vector<index_t> chosen(const S& policy, const std::vector<float>& scores, index_t tail, index_t keep) {
  const index_t n = index_t(scores.size());
  std::vector<index_t> out(std::size_t(std::max(n, 1)) + 1, -7);
  top_k_scratch scratch;
  const index_t count = choose_slots(policy, scores.data(), n, tail, keep, out.data(), scratch);
  REQUIRE(out[std::size_t(count)] == -7);
  out.resize(std::size_t(count));
  return out;
}

template <selector S>
void obeys_the_laws_of_selectors(const S& policy) {
  rng random(41);
  for (index_t i = 0; i < scaled(4'000); ++i) {
    const index_t n = random.between(0, 70), tail = random.between(0, n + 2), keep = random.between(-1, n + 2);
    auto scores = tied_scores(random, n, random.pick({1, 3, 30}));
    for (auto& score : scores) score = random.chance(0.05) ? random.pick({not_a_number, infinity, -infinity}) : score;
    const auto result = chosen(policy, scores, tail, keep);
    REQUIRE(index_t(result.size()) == std::clamp(keep, 0, n));
    for (std::size_t s = 0; s < result.size(); ++s) {
      REQUIRE((result[s] >= 0 && result[s] < n && (s == 0 || result[s] > result[s - 1])));
    }
    // The newest min(tail, keep) slots are there.
    for (index_t back = 1; back <= std::min({tail, keep, n}); ++back) {
      REQUIRE(result[result.size() - std::size_t(back)] == n - back);
    }
    REQUIRE(chosen(policy, scores, tail, keep) == result);
  }
  // Ties to the lower slots, whatever the unit: of equal scores the first are chosen.
  for (const index_t n : {1, 31, 32, 33, 64}) {
    for (index_t keep = 0; keep <= n; ++keep) {
      const auto result = chosen(policy, std::vector<float>(std::size_t(n), 0.5f), 0, keep);
      for (index_t slot = 0; slot < keep; ++slot) REQUIRE(result[std::size_t(slot)] == slot);
    }
  }
  // NaN last: a run of NaN is only chosen when the rest is gone.
  std::vector<float> scores(64, -1.0f);
  for (std::size_t slot = 0; slot < 32; ++slot) scores[slot] = not_a_number;
  CHECK(chosen(policy, scores, 0, 32).front() == 32);
  CHECK(chosen(policy, scores, 0, 33).front() == 0);
}

// --- budget ---

template <budget B>
void obeys_the_laws_of_budgets(B policy) {
  rng random(42);
  for (index_t i = 0; i < scaled(4'000); ++i) {
    policy.tokens = random.between(1, 60);
    const index_t tail = random.between(0, policy.tokens);
    std::vector<std::vector<float>> heads;
    const bool even = random.chance(0.5);
    const index_t length = random.between(1, 90);
    for (index_t h = 0; h < random.between(1, 6) || heads.empty(); ++h) {
      heads.push_back(tied_scores(random, even ? length : random.between(1, 90), random.pick({1, 4, 40})));
    }
    const owned_scores scores(heads);
    const index_t layers = random.between(1, 8), layer = random.between(0, layers - 1);
    const auto result = counts(policy, scores.view(tail, layer, layers));
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const index_t n = scores.tokens[h];
      REQUIRE(result[h] >= std::min(tail, n));
      REQUIRE(result[h] <= n);
    }
    REQUIRE(counts(policy, scores.view(tail, layer, layers)) == result);
  }
  policy.tokens = 0;
  CHECK_THROWS_AS(policy.check(), error);
  policy.tokens = -3;
  CHECK_THROWS_WITH(policy.check(), contains("budget is -3; expected 1"));
  policy.tokens = 1;
  CHECK_NOTHROW(policy.check());
}

// --- scorer ---

template <scorer S>
void obeys_the_laws_of_scorers(const S& policy) {
  rng random(43);
  const auto finish = [&](const std::vector<float>& in, std::vector<float>& out) {
    host_vector<float> scratch;
    const float* from = cpu::finished(policy, in.data(), index_t(in.size()), out.data(), scratch);
    if (from == in.data()) out = in;
  };
  CHECK(std::strlen(S::name) > 0);
  CHECK_NOTHROW(policy.check(64));
  for (const index_t budget : {1, 2, 31, 32, 33, 1000}) CHECK(policy.protected_tail(budget) >= 0);
  for (const index_t n : {0, 1, 2, 31, 32, 33, 200}) {
    auto in = normals(random, std::size_t(n));
    if (n > 2) in[std::size_t(n) / 2] = not_a_number;
    const auto before = in;
    std::vector<float> out(std::size_t(n), 77), again = out;
    finish(in, out);
    finish(in, again);
    for (std::size_t i = 0; i < out.size(); ++i) {
      // A NaN score ranks last and reaches no other token.
      const bool ranks_last = std::isnan(out[i]) || out[i] == -infinity;
      REQUIRE(ranks_last == std::isnan(before[i]));
      REQUIRE(std::memcmp(&out[i], &again[i], sizeof(float)) == 0);
      REQUIRE(std::memcmp(&in[i], &before[i], sizeof(float)) == 0);
    }
  }
  // A constant head stays constant where every neighbour exists.
  const std::vector<float> flat(64, 0.25f);
  std::vector<float> out(64);
  finish(flat, out);
  CHECK(out[32] == 0.25f);
  if constexpr (attentive_scorer<S>) {
    CHECK(policy.weigh(1.0f, 3.0f) > 0);
    CHECK(policy.weigh(2.0f, 3.0f) > policy.weigh(1.0f, 3.0f));
    CHECK(policy.weigh(-infinity, 3.0f) == 0);
    CHECK(policy.weigh(3.0f, 3.0f) == 1);
    CHECK(std::isnan(policy.weigh(not_a_number, 3.0f)));
  } else if constexpr (statistical_scorer<S>) {
    // More to expect of a larger mean, no less of a larger variance; of no number, none.
    for (const float variance : {0.0f, 0.5f, 4.0f}) {
      CHECK(policy.expect(2.0f, variance) > policy.expect(1.0f, variance));
      CHECK(policy.expect(1.0f, variance + 1) >= policy.expect(1.0f, variance));
      CHECK(std::isnan(policy.expect(not_a_number, variance)));
    }
  } else if constexpr (positional_scorer<S>) {
    for (index_t at = 0; at < 1'000; ++at) REQUIRE(!std::isnan(policy.score(at, 1'000)));
  } else if constexpr (lagged_scorer<S>) {
    // Ranks rise, below everything outside; what is outside is a number, sinks above all.
    for (index_t rank = 1; rank < policy.lag; ++rank) REQUIRE(policy.ranked(rank) > policy.ranked(rank - 1));
    for (index_t slot = 0; slot < 1'000; ++slot) REQUIRE(policy.outside(slot, 1'000) > policy.ranked(policy.lag - 1));
    float sums[4] = {};
    policy.measure(not_a_number, policy.scale(0.0f, 1.0f), sums);
    CHECK(std::isnan(policy.spread(sums, 64)));
  } else {
    // Of any row whose elements are finite, a number; in any order of its channels, but for rounding.
    static_assert(contents_scorer<S> && S::measures >= 1 && S::measures <= 4);
    for (int i = 0; i < 100; ++i) {
      const auto row = normals(random, 64), anchor = normals(random, 64);
      float sums[4] = {}, back[4] = {};
      for (std::size_t d = 0; d < 64; ++d) policy.measure(row[d], anchor[d], sums);
      for (std::size_t d = 64; d-- > 0;) policy.measure(row[d], anchor[d], back);
      REQUIRE(std::isfinite(policy.score(sums)));
      REQUIRE(policy.score(back) == Approx(policy.score(sums)).epsilon(1e-4).margin(1e-5));
    }
    // What is not finite ranks last.
    float sums[4] = {};
    policy.measure(not_a_number, 1.0f, sums);
    CHECK(std::isnan(policy.score(sums)));
    for (const float x : {infinity, -infinity, std::numeric_limits<float>::max()}) {
      float of_row[4] = {};
      for (int d = 0; d < 64; ++d) policy.measure(d == 5 ? x : 1.0f, 1.0f, of_row);
      const float score = policy.score(of_row);
      CHECK((std::isnan(score) || score == -infinity || std::abs(x) < infinity));
      CHECK(!(score == infinity));
    }
  }
}

// --- schedule ---

/// `more`: the same with other numbers. What a schedule can do at all, one of them does.
template <schedule S, std::same_as<S>... More>
void obeys_the_laws_of_schedules(const S& first, const More&... more) {
  CHECK(std::strlen(S::name) > 0);
  for (const moment now : {moment::prompt_end, moment::step_begin, moment::step_end}) {
    bool fired = false;
    for (index_t turn = 1; turn <= 4; ++turn) {
      for (index_t steps = now == moment::prompt_end ? 0 : 1; steps <= (now == moment::prompt_end ? 0 : 200); ++steps) {
        const turn_clock clock{turn, steps, steps, index_t(steps > 0)};  // each step has one token
        for (const S& policy : {first, more...}) {
          const bool due = policy.due(now, clock);
          fired |= due;
          // What is due is a matter of the moment and the clock alone.
          REQUIRE(policy.due(now, clock) == due);
        }
      }
    }
    CHECK(fired == S::fires_at(now));
  }
  bool at_a_chunk = false;
  for (const index_t waiting : {0, 1, 1'000, 1'000'000}) {
    const turn_clock at{.turn = 1, .waiting = waiting, .coming = 64};
    for (const S& policy : {first, more...}) {
      const bool due = policy.due(moment::chunk_end, at);
      at_a_chunk |= due;
      REQUIRE((!due || waiting > 0));  // there is something to choose among
    }
  }
  CHECK(at_a_chunk == S::fires_at(moment::chunk_end));
}

}  // namespace support
