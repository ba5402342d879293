// A sample of the queries: scores are the sum over those that are taken, in chunks as at once, in prompts and in steps.
#include "catch.hpp"

#include <cmath>
#include <memory>
#include <vector>

#include <tessera/attention/dense_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/schedule/each_step.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/newest_attention.hpp>
#include <tessera/scorer/sampled.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
constexpr index_t kv_heads = 2, q_heads = 4, tokens = 60;

template <class Scorer, class Schedule = once>
struct kept_by : recipe<retain<Scorer, uniform, top_tokens>, dense<fp32, dim>, retrieve_all, dense_decode, Schedule> {};

static_assert(sampling_scorer<sampled<accumulated_attention>> && check_scorer<sampled<accumulated_attention>>());
static_assert(!sampling_scorer<accumulated_attention>);

struct rows_of_text {
  std::vector<float> q, k;
  explicit rows_of_text(support::rng& random)
      : q(support::normals(random, std::size_t(tokens * q_heads * dim), 1.5f)),
        k(support::normals(random, std::size_t(tokens * kv_heads * dim))) {}
  rows_view<const float> queries(index_t first, index_t n) const {
    return nhd_rows(q.data() + first * q_heads * dim, n, q_heads, dim);
  }
  rows_view<const float> keys(index_t first, index_t n) const {
    return nhd_rows(k.data() + first * kv_heads * dim, n, kv_heads, dim);
  }
};

template <class Recipe>
std::vector<std::vector<index_t>> kept(const Recipe& policies, const rows_of_text& of, index_t chunk, index_t steps) {
  cache<Recipe> kv({1, q_heads, kv_heads}, policies, std::make_shared<cpu::executor>(1));
  const index_t id = kv.open(), prompt = tokens - steps;
  for (index_t done = 0; done < prompt; done += chunk) {
    const index_t n = std::min(chunk, prompt - done);
    kv.prefill(0, id, of.queries(done, n), of.keys(done, n), of.keys(done, n));
  }
  kv.end_prefill(id);
  std::vector<float> out(std::size_t(q_heads * dim));
  for (index_t at = prompt; at < tokens; ++at)
    kv.decode(0, kv.prepare_step({id}, 1), of.queries(at, 1), of.keys(at, 1), of.keys(at, 1),
              nhd_rows(out.data(), 1, q_heads, dim));
  return {kv.positions(0, id, 0), kv.positions(0, id, 1)};
}

}  // namespace

TEST_CASE("tokens are kept by the attention of the sampled queries alone, in any chunks") {
  support::rng random(6201);
  for (index_t round = 0; round < support::scaled(200); ++round) {
    const rows_of_text of(random);
    kept_by<sampled<accumulated_attention>> policies;
    policies.set_budget(random.between(2, 40));
    policies.retain.scorer.recent = 1;
    policies.retain.scorer.sample = float(random.pick({0.1, 0.3, 0.7, 1.0}));
    policies.retain.scorer.sample_seed = random.between(0, 1000);
    const auto once = kept(policies, of, tokens, 0);
    for (const index_t chunk : {1, 7, 59}) REQUIRE(kept(policies, of, chunk, 0) == once);
    for (index_t h = 0; h < kv_heads; ++h) {
      std::vector<double> scores(tokens, 0.0);
      for (index_t at = 0; at < tokens; ++at) {
        if (!policies.retain.scorer.takes(at)) continue;
        for (index_t g = 0; g < q_heads / kv_heads; ++g) {
          std::vector<const float*> keys;
          std::vector<index_t> positions;
          for (index_t i = 0; i <= at; ++i)
            keys.push_back(of.k.data() + (i * kv_heads + h) * dim), positions.push_back(i);
          const auto row = oracle::attend(of.q.data() + (at * q_heads + h * (q_heads / kv_heads) + g) * dim, at, keys,
                                          {}, positions, dim, dim);
          for (index_t i = 0; i <= at; ++i) scores[std::size_t(i)] += row.probabilities[std::size_t(i)];
        }
      }
      // Whatever was kept instead of what should have been has a score that differs by rounding alone.
      const auto expected = oracle::top_tokens(scores, 1, policies.budget());
      const auto& got = once[std::size_t(h)];
      REQUIRE(got.size() == expected.size());
      double lost = 0, taken = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        lost += scores[std::size_t(expected[i])];
        taken += scores[std::size_t(got[i])];
      }
      CAPTURE(round, h, policies.retain.scorer.sample);
      REQUIRE(std::abs(lost - taken) < 1e-4);
    }
  }
}

TEST_CASE("a sample of all queries is every query, of none it says nothing, and steps are sampled as prompts are") {
  support::rng random(6202);
  const rows_of_text of(random);
  kept_by<sampled<accumulated_attention>, each_step> all;
  kept_by<accumulated_attention, each_step> plain;
  all.set_budget(20), plain.set_budget(20);
  all.retain.scorer.recent = plain.retain.scorer.recent = 4;
  all.retain.scorer.sample = 1;
  CHECK(kept(all, of, 9, 12) == kept(plain, of, 9, 12));
  auto part = all;
  part.retain.scorer.sample = 0.3f;
  CHECK(kept(part, of, 9, 12) != kept(plain, of, 9, 12));
  kept_by<sampled<accumulated_attention>> none;
  none.set_budget(5);
  none.retain.scorer.recent = 2;
  none.retain.scorer.sample = 0;
  CHECK(kept(none, of, tokens, 0)[0] == std::vector<index_t>{0, 1, 2, 58, 59});  // all tie: the lower index first
}

TEST_CASE("of a scorer of the newest query the newest sampled one counts") {
  support::rng random(6203);
  const rows_of_text of(random);
  kept_by<sampled<newest_attention>> policies;
  policies.set_budget(10);
  policies.retain.scorer.sample = 0.3f;
  const auto once = kept(policies, of, tokens, 0);
  CHECK(kept(policies, of, 7, 0) == once);
  CHECK(kept(policies, of, 1, 0) == once);
  policies.retain.scorer.sample = 1;
  kept_by<newest_attention> plain;
  plain.set_budget(10);
  CHECK(kept(policies, of, 7, 0) == kept(plain, of, 7, 0));
}

TEST_CASE("a sample that is no part is refused") {
  kept_by<sampled<accumulated_attention>> policies;
  policies.set_budget(10);
  policies.retain.scorer.sample = 1.5f;
  CHECK_THROWS_WITH(policies.check(), contains("sample is 1.5; expected 0 to 1"));
}
