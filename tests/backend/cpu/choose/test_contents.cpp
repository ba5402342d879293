// Methods that look at what is stored, or at the newest query alone: keep sets of random layers against double.
#include "catch.hpp"

#include <limits>
#include <memory>
#include <vector>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/cache.hpp>
#include <tessera/methods/keydiff.hpp>
#include <tessera/methods/knorm.hpp>
#include <tessera/methods/lagkv.hpp>
#include <tessera/methods/tova.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
using support::rng;
using support::scaled;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;

/// Keys and values of one sequence, [kv_heads, tokens, dim].
struct layer {
  index_t kv_heads, tokens;
  std::vector<float> k, v;
  std::vector<index_t> lengths;

  explicit layer(rng& random) : kv_heads(random.between(1, 3)), tokens(random.between(1, 90)) {
    const index_t rows = kv_heads * tokens;
    k = random.chance(0.3) ? support::repeated_rows(random, rows, dim, random.between(2, 6))
                           : support::normals(random, std::size_t(rows * dim), random.pick({0.1f, 1.0f, 30.0f}));
    v = support::normals(random, k.size());
    lengths.assign(std::size_t(kv_heads), tokens);
  }
  const float* key(index_t head, index_t token) const { return k.data() + (offset_t(head) * tokens + token) * dim; }

  choose_problem<kv_view<const float, dim>, float> problem(const index_t& next) const {
    choose_problem<kv_view<const float, dim>, float> p;
    p.view.k = k.data();
    p.view.v = v.data();
    p.view.k_strides = p.view.v_strides = {0, offset_t(tokens) * dim, dim, 1};
    p.view.sequences = 1;
    p.view.kv_heads = kv_heads;
    p.view.lengths = lengths.data();
    p.view.length_strides = {0, 1};
    p.first_position = &next;
    return p;
  }
};

std::vector<double> minus_norms(const layer& of, index_t head) {
  std::vector<double> scores;
  for (index_t t = 0; t < of.tokens; ++t) {
    double sum = 0;
    for (int d = 0; d < dim; ++d) sum += double(of.key(head, t)[d]) * double(of.key(head, t)[d]);
    scores.push_back(-std::sqrt(sum));
  }
  return scores;
}

std::vector<double> minus_cosines(const layer& of, index_t head) {
  const auto norms = minus_norms(of, head);
  std::vector<double> mean(dim, 0.0), scores;
  for (index_t t = 0; t < of.tokens; ++t) {
    for (int d = 0; d < dim; ++d)
      mean[std::size_t(d)] += double(of.key(head, t)[d]) / -norms[std::size_t(t)] / of.tokens;
  }
  double length = 0;
  for (const double x : mean) length += x * x;
  for (index_t t = 0; t < of.tokens; ++t) {
    double dot = 0;
    for (int d = 0; d < dim; ++d) dot += double(of.key(head, t)[d]) * mean[std::size_t(d)];
    scores.push_back(dot / norms[std::size_t(t)] / std::sqrt(length));
  }
  return scores;
}

/// What was chosen is what the scores in double choose, unless two different ones meet at the cut.
template <class Policy, class Scores>
void compare(std::uint64_t seed, const Scores& scores_of) {
  rng random(seed);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  selection kept;
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < scaled(1'000); ++i) {
    const layer of(random);
    Policy policy;
    policy.budget.tokens = random.between(1, of.tokens + 2);
    cpu::score_and_choose(policy, of.problem(of.tokens), kept, workspace, workers);
    for (index_t h = 0; h < of.kv_heads; ++h) {
      CAPTURE(i, h, of.tokens, policy.budget.tokens);
      const std::vector<index_t> got(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
      const auto scores = scores_of(of, h);
      const index_t keep = std::min(policy.budget.tokens, of.tokens);
      const auto order = oracle::preference(scores);
      // Equal keys score alike to the bit; other keys that come close to the last one taken are open.
      const index_t last = order[std::size_t(keep - 1)];
      bool close = false;
      for (index_t t = 0; t < of.tokens; ++t) {
        const double a = scores[std::size_t(t)], b = scores[std::size_t(last)];
        close |= std::abs(a - b) <= 1e-5 * std::abs(b) + 1e-7 &&
                 !std::equal(of.key(h, t), of.key(h, t) + dim, of.key(h, last));
      }
      ++compared;
      open += close;
      REQUIRE(index_t(got.size()) == keep);
      if (!close) REQUIRE(got == oracle::top_k(scores, keep));
    }
  }
  INFO(compared << " compared, " << open << " open to rounding");
  CHECK(double(open) < 0.1 * double(compared) + 5);
}

}  // namespace

TEST_CASE("knorm keeps the keys of smallest norm") { compare<knorm<fp32, dim>::retain_type>(5501, minus_norms); }

TEST_CASE("keydiff keeps the keys that point away from their mean") {
  compare<keydiff<fp32, dim>::retain_type>(5502, minus_cosines);
}

namespace {

/// LagKV's scores of one head, and which slots' ranks hang on rounding.
struct lagged {
  std::vector<double> scores;
  bool open = false;
};

lagged lag_scores(const layer& of, index_t head, index_t sinks, index_t lag) {
  lagged result;
  for (index_t t = 0; t < of.tokens; ++t) {
    result.scores.push_back(t < sinks ? oracle::infinite : 1 + double(t - sinks) / of.tokens);
  }
  const index_t partitions = std::max(0, of.tokens - sinks) / lag;
  for (index_t p = 0; p + 1 < partitions; ++p) {
    const index_t first = sinks + p * lag;
    std::vector<double> sum(std::size_t(lag), 0.0);
    for (const auto* rows : {&of.k, &of.v}) {
      const auto row = [&](index_t t) { return rows->data() + (offset_t(head) * of.tokens + t) * dim; };
      std::vector<double> spreads;
      for (index_t t = first; t < first + lag; ++t) {
        std::vector<double> scaled;
        for (int d = 0; d < dim; ++d) {
          std::vector<double> next;
          for (index_t n = first + lag; n < first + 2 * lag; ++n) next.push_back(double(row(n)[d]));
          const double low = *std::min_element(next.begin(), next.end()),
                       high = *std::max_element(next.begin(), next.end());
          scaled.push_back(high > low ? (double(row(t)[d]) - low) / (high - low) : 0);
        }
        double mean = 0, squares = 0;
        for (const double x : scaled) mean += x / dim;
        for (const double x : scaled) squares += (x - mean) * (x - mean);
        spreads.push_back(std::sqrt(squares / (dim - 1)));
      }
      double total = 0;
      const double top = *std::max_element(spreads.begin(), spreads.end());
      for (const double x : spreads) total += std::exp(x - top);
      for (std::size_t i = 0; i < spreads.size(); ++i) sum[i] += std::exp(spreads[i] - top) / total / 2;
    }
    const auto order = oracle::preference(sum);
    for (std::size_t i = 0; i < order.size(); ++i) {
      result.scores[std::size_t(first + order[i])] = double(lag - 1 - index_t(i)) / lag;
      if (i > 0)
        result.open |= sum[std::size_t(order[i - 1])] - sum[std::size_t(order[i])] < 1e-5 * sum[std::size_t(order[i])];
    }
  }
  return result;
}

}  // namespace

TEST_CASE("lagkv keeps sinks, the newest, and what spreads most beside the tokens behind it") {
  rng random(5505);
  cpu::executor workers(2);
  cpu::choose_workspace<dim> workspace;
  selection kept;
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < scaled(1'000); ++i) {
    const layer of(random);
    lagkv<fp32, dim>::retain_type policy;
    policy.scorer.sinks = random.between(0, 4);
    policy.scorer.lag = random.between(2, 12);
    policy.budget.tokens = random.between(policy.scorer.sinks + 1, of.tokens + 5);
    cpu::score_and_choose(policy, of.problem(of.tokens), kept, workspace, workers);
    const index_t keep = std::min(policy.budget.tokens, of.tokens);
    for (index_t h = 0; h < of.kv_heads; ++h) {
      CAPTURE(i, h, of.tokens, keep, policy.scorer.lag, policy.scorer.sinks);
      const std::vector<index_t> got(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
      const auto expected = lag_scores(of, h, policy.scorer.sinks, policy.scorer.lag);
      ++compared;
      open += expected.open && keep < of.tokens;
      REQUIRE(index_t(got.size()) == keep);
      if (!expected.open || keep == of.tokens) REQUIRE(got == oracle::top_k(expected.scores, keep));
    }
  }
  INFO(compared << " compared, " << open << " open to rounding");
  CHECK(double(open) < 0.05 * double(compared) + 5);
}

TEST_CASE("a row that is not finite takes no other token's rank in lagkv") {
  rng random(5506);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  selection kept;
  for (int i = 0; i < 100; ++i) {
    layer of(random);
    lagkv<fp32, dim>::retain_type policy;
    policy.scorer.sinks = 0;
    policy.scorer.lag = 4;
    if (of.tokens < 12) continue;
    policy.budget.tokens = of.tokens - 1;
    const index_t bad = random.between(0, 3);
    (random.chance(0.5) ? of.k : of.v)[std::size_t(bad * dim + 3)] = random.pick({std::nanf(""), infinity, -infinity});
    const auto seen = cpu::score_and_choose(policy, of.problem(of.tokens), kept, workspace, workers);
    for (index_t t = 0; t < of.tokens; ++t) REQUIRE((t == bad || std::isfinite(seen.head(0)[t])));
    for (index_t s = 0; s < kept.counts[0]; ++s) REQUIRE(kept.row(0)[s] != bad);
  }
}

TEST_CASE("a key that is not finite goes first and moves no other key's score") {
  rng random(5503);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  selection kept, clean;
  for (int i = 0; i < 100; ++i) {
    layer of(random);
    if (of.tokens < 3) continue;
    const index_t bad = random.between(0, of.tokens - 1);
    keydiff<fp32, dim>::retain_type policy;
    policy.budget.tokens = of.tokens - 1;
    of.k[std::size_t(bad * dim + 3)] = random.pick({std::nanf(""), infinity});
    const auto seen = cpu::score_and_choose(policy, of.problem(of.tokens), kept, workspace, workers);
    for (index_t t = 0; t < of.tokens; ++t) REQUIRE((t == bad || std::isfinite(seen.head(0)[t])));
    for (index_t s = 0; s < kept.counts[0]; ++s) REQUIRE(kept.row(0)[s] != bad);
  }
}

TEST_CASE("tova keeps after every step what the newest query of all heads attends most, in any chunks") {
  rng random(5504);
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < scaled(300); ++i) {
    const index_t kv_heads = random.between(1, 3), group = random.pick({1, 2, 3}), q_heads = kv_heads * group;
    const model_shape shape{1, q_heads, kv_heads};
    const index_t prompt = random.between(1, 60), steps = random.between(0, 6), all = prompt + steps;
    tova<fp32, dim> recipe;
    recipe.set_budget(random.between(1, 30));
    const index_t budget = recipe.budget();
    cache<tova<fp32, dim>> kv(shape, recipe, std::make_shared<cpu::executor>(1));
    const index_t id = kv.open();
    const auto q = support::normals(random, std::size_t(all * q_heads * dim), 1.5f),
               k = support::normals(random, std::size_t(all * kv_heads * dim));
    const auto rows = [&](const std::vector<float>& x, index_t heads, index_t first, index_t count) {
      return nhd_rows(x.data() + first * heads * dim, count, heads, dim);
    };
    for (index_t done = 0; done < prompt;) {
      const index_t chunk = random.between(1, prompt - done);
      // The chunk's newest query is all that it needs.
      const index_t queries = random.chance(0.5) ? 1 : chunk;
      kv.prefill(0, id, rows(q, q_heads, done + chunk - queries, queries), rows(k, kv_heads, done, chunk),
                 rows(k, kv_heads, done, chunk));
      done += chunk;
    }
    kv.end_prefill(id);
    std::vector<index_t> stored;
    for (index_t t = 0; t < prompt; ++t) stored.push_back(t);
    std::vector<float> out(std::size_t(q_heads * dim));
    for (index_t next = prompt;; ++next) {
      std::vector<double> scores(stored.size(), 0.0);
      for (index_t h = 0; h < q_heads; ++h) {
        std::vector<const float*> keys;
        for (const index_t at : stored) keys.push_back(k.data() + (at * kv_heads + h / group) * dim);
        const auto seen =
            oracle::attend(q.data() + ((next - 1) * q_heads + h) * dim, next - 1, keys, {}, stored, dim, dim);
        for (std::size_t s = 0; s < scores.size(); ++s) scores[s] += seen.probabilities[s] / q_heads;
      }
      const auto slots = oracle::top_tokens(scores, 1, budget);
      bool close = false;
      if (index_t(stored.size()) > budget && budget > 1) {
        const std::vector<double> candidates(scores.begin(), scores.end() - 1);
        const double last = candidates[std::size_t(oracle::preference(candidates)[std::size_t(budget - 2)])];
        for (const double score : candidates) close |= score != last && std::abs(score - last) <= 3e-5 * last;
      }
      std::vector<index_t> expected;
      for (const index_t slot : slots) expected.push_back(stored[std::size_t(slot)]);
      const auto got = kv.positions(0, id, 0);
      CAPTURE(i, next, prompt, budget, kv_heads, group);
      for (index_t h = 1; h < kv_heads; ++h) REQUIRE(kv.positions(0, id, h) == got);
      REQUIRE(got.size() == expected.size());
      ++compared;
      open += close;
      if (!close) REQUIRE(got == expected);
      stored = got;
      if (next == all) break;
      const batch step = kv.prepare_step({id}, 1);
      kv.decode(0, step, rows(q, q_heads, next, 1), rows(k, kv_heads, next, 1), rows(k, kv_heads, next, 1),
                nhd_rows(out.data(), 1, q_heads, dim));
      stored.push_back(next);
    }
  }
  CHECK(double(open) < 0.05 * double(compared) + 5);
}
