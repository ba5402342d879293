// Expected Attention over random layers against double: rotation matrices spelled out, covariance of centred queries.
#include "catch.hpp"

#include <memory>
#include <numeric>
#include <vector>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/cache.hpp>
#include <tessera/methods/expected_attention.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
using support::rng;
using support::scaled;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64, half = dim / 2;
using method = expected_attention<fp32, dim>;
static_assert(statistical_scorer<method::retain_type::scorer_type> &&
              multiplied_scorer<method::retain_type::scorer_type>);
static_assert(method::needs_rope && runs_on_devices<method>);

/// Queries after RoPE [tokens, q_heads, dim], keys and values [tokens, kv_heads, dim] of one prompt.
struct text {
  index_t kv_heads, group, tokens;
  std::vector<float> q, k, v;
  model_shape shape;

  explicit text(rng& random)
      : kv_heads(random.between(1, 3)),
        group(random.between(1, 3)),
        tokens(random.between(1, 70)),
        shape{1, kv_heads * group, kv_heads} {
    const float base = random.pick({100.0f, 10'000.0f, 1'000'000.0f});
    for (int d = 0; d < half; ++d) shape.rope_frequencies.push_back(std::pow(base, -float(d) / half));
    q = support::normals(random, std::size_t(tokens * shape.q_heads * dim), random.pick({0.3f, 1.0f}));
    k = support::normals(random, std::size_t(tokens * kv_heads * dim), random.pick({0.3f, 1.0f}));
    v = support::normals(random, k.size(), random.pick({0.1f, 5.0f}));
  }
  rows_view<const float> rows(const std::vector<float>& x, index_t heads, index_t first, index_t count) const {
    return nhd_rows(x.data() + offset_t(first) * heads * dim, count, heads, dim);
  }
  const float* key(index_t head, index_t t) const { return k.data() + (t * kv_heads + head) * dim; }
  const float* value(index_t head, index_t t) const { return v.data() + (t * kv_heads + head) * dim; }
};

using matrix = std::vector<std::vector<double>>;  // [dim][dim]

/// RoPE at a position, as a matrix.
matrix rotation(const std::vector<float>& speeds, index_t position) {
  matrix turn(dim, std::vector<double>(dim, 0.0));
  for (int d = 0; d < half; ++d) {
    const double angle = double(float(position) * speeds[std::size_t(d)]);
    const auto i = std::size_t(d), j = std::size_t(d + half);
    turn[i][i] = turn[j][j] = std::cos(angle);
    turn[j][i] = std::sin(angle);
    turn[i][j] = -turn[j][i];
  }
  return turn;
}
std::vector<double> product(const matrix& m, const std::vector<double>& x, bool transposed = false) {
  std::vector<double> result(dim, 0.0);
  for (std::size_t i = 0; i < dim; ++i) {
    for (std::size_t j = 0; j < dim; ++j) result[i] += (transposed ? m[j][i] : m[i][j]) * x[j];
  }
  return result;
}

struct settings {
  index_t sinks = 4, future = 512, covariance = 1;
  double epsilon = 0;
};

/// By slot of a kv_head. Queries are turned back one by one, keys are turned by the transposed mean rotation, and a variance
/// is the mean square of the centred queries' products with the key.
std::vector<double> expected_scores(const text& of, index_t head, const settings& with) {
  matrix mean_turn(dim, std::vector<double>(dim, 0.0));
  for (index_t p = of.tokens; p < of.tokens + with.future; ++p) {
    const matrix turn = rotation(of.shape.rope_frequencies, p);
    for (std::size_t i = 0; i < dim; ++i) {
      for (std::size_t j = 0; j < dim; ++j) mean_turn[i][j] += turn[i][j] / with.future;
    }
  }
  std::vector<double> scores(std::size_t(of.tokens), 0.0);
  for (index_t g = 0; g < of.group; ++g) {
    std::vector<std::vector<double>> queries;
    for (index_t t = with.sinks; t < of.tokens; ++t) {
      const float* q = of.q.data() + (t * of.shape.q_heads + head * of.group + g) * dim;
      queries.push_back(product(rotation(of.shape.rope_frequencies, t), {q, q + dim}, true));
    }
    std::vector<double> logits;
    for (index_t t = with.sinks; t < of.tokens; ++t) {
      const auto key = product(mean_turn, {of.key(head, t), of.key(head, t) + dim}, true);
      double mean = 0, variance = 0;
      std::vector<double> products;
      for (const auto& q : queries) {
        products.push_back(std::inner_product(q.begin(), q.end(), key.begin(), 0.0) / std::sqrt(double(dim)));
        mean += products.back() / double(queries.size());
      }
      for (const double x : products) variance += (x - mean) * (x - mean) / double(queries.size());
      logits.push_back(mean + (with.covariance ? variance / 2 : 0));
    }
    double total = 0, top = logits.empty() ? 0 : *std::max_element(logits.begin(), logits.end());
    for (const double x : logits) total += std::exp(x - top);
    for (std::size_t i = 0; i < logits.size(); ++i)
      scores[i + std::size_t(with.sinks)] += std::exp(logits[i] - top) / total / of.group;
  }
  for (index_t t = 0; t < of.tokens; ++t) {
    double square = 0;
    for (int d = 0; d < dim; ++d) square += double(of.value(head, t)[d]) * double(of.value(head, t)[d]);
    double& score = scores[std::size_t(t)];
    score = t < with.sinks ? oracle::infinite : (score + with.epsilon) * std::sqrt(square);
  }
  return scores;
}

method configured(const settings& with, index_t budget, index_t floor_tenths) {
  method recipe;
  recipe.set_budget(budget);
  auto& scorer = recipe.retain.scorer;
  scorer.sinks = with.sinks;
  scorer.future = with.future;
  scorer.covariance = with.covariance;
  scorer.epsilon = float(with.epsilon);
  recipe.retain.budget.floor = float(floor_tenths) / 10;
  return recipe;
}

bool too_close(double a, double b) {
  return a != b && std::isfinite(a) && std::isfinite(b) && std::abs(a - b) <= 1e-4 * std::max(std::abs(a), std::abs(b));
}

}  // namespace

TEST_CASE("expected_weight keeps the laws of scorers") {
  support::obeys_the_laws_of_scorers(expected_weight{});
  support::obeys_the_laws_of_scorers(value_length{});
  support::obeys_the_laws_of_scorers(multiplied_by<expected_weight, value_length>{});
}

TEST_CASE("expected_weight is the logarithm of the mean of exponentials of a Gaussian") {
  CHECK(expected_weight{}.expect(0.5f, 3.0f) == 2.0f);
  CHECK(expected_weight{.covariance = 0}.expect(0.5f, 3.0f) == 0.5f);
  CHECK(multiplied_by<expected_weight, value_length>{}.multiplied(infinity, 0) == infinity);
  CHECK(std::isnan(multiplied_by<expected_weight, value_length>{}.multiplied(0.5f, infinity)));
  CHECK_THROWS_WITH(expected_weight{.future = 0}.check(9), contains("future is 0; expected 1 to 65536"));
}

TEST_CASE("expected_attention keeps what double does, in one shot and in chunks") {
  rng random(1301);
  const auto workers = std::make_shared<cpu::executor>(2);
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < scaled(1'000); ++i) {
    const text of(random);
    const settings with{random.between(0, 5), random.pick({1, 7, 100}), random.between(0, 1),
                        random.pick({0.0, 0.0, 0.02})};
    const index_t budget = random.between(1, 50), floor = random.pick({10, 10, 2, 0});
    CAPTURE(i, of.tokens, of.kv_heads, of.group, budget, floor, with.sinks, with.future, with.covariance);
    cache<method> kv(of.shape, configured(with, budget, floor), workers), chunked = kv;
    const index_t id = kv.open();
    REQUIRE(chunked.open() == id);
    const auto prefill = [&](cache<method>& to, index_t first, index_t count) {
      to.prefill(0, id, of.rows(of.q, of.shape.q_heads, first, count), of.rows(of.k, of.kv_heads, first, count),
                 of.rows(of.v, of.kv_heads, first, count));
    };
    prefill(kv, 0, of.tokens);
    for (index_t done = 0; done < of.tokens;) {
      const index_t chunk = random.between(1, of.tokens - done);
      prefill(chunked, done, chunk);
      done += chunk;
    }
    kv.end_prefill(id);
    chunked.end_prefill(id);
    std::vector<std::vector<double>> scores;
    const std::vector<index_t> lengths(std::size_t(of.kv_heads), of.tokens);
    for (index_t h = 0; h < of.kv_heads; ++h) scores.push_back(expected_scores(of, h, with));
    const auto counts = oracle::adaptive_counts(scores, lengths, budget, 0, 100 * floor);
    std::vector<double> all;
    for (const auto& head : scores) all.insert(all.end(), head.begin(), head.end());
    bool heads_open = false;  // which head wins the layer's last place
    if (floor < 10 && of.tokens > budget) {
      const double last = all[std::size_t(oracle::preference(all)[std::size_t(budget * of.kv_heads - 1)])];
      for (const double score : all) heads_open |= too_close(score, last);
    }
    for (index_t h = 0; h < of.kv_heads; ++h) {
      REQUIRE(chunked.positions(0, id, h) == kv.positions(0, id, h));
      const auto& own = scores[std::size_t(h)];
      const index_t keep = of.tokens <= budget ? of.tokens : counts[std::size_t(h)];
      bool close = heads_open;
      if (keep > 0 && keep < of.tokens) {
        const double last = own[std::size_t(oracle::preference(own)[std::size_t(keep - 1)])];
        for (const double score : own) close |= too_close(score, last);
      }
      ++compared;
      open += close;
      if (!close) REQUIRE(kv.positions(0, id, h) == oracle::top_k(own, keep));
    }
  }
  INFO(compared << " compared, " << open << " open to rounding");
  CHECK(double(open) < 0.08 * double(compared) + 5);
}

TEST_CASE("a query or a key that is not finite moves no other token's score") {
  rng random(1302);
  const auto workers = std::make_shared<cpu::executor>(1);
  for (int i = 0; i < 60; ++i) {
    text of(random);
    if (of.tokens < 8) continue;
    const index_t bad = random.between(5, of.tokens - 1);
    const float poison = random.pick({std::nanf(""), infinity, -infinity});
    const bool in_key = random.chance(0.5);
    if (in_key) of.k[std::size_t(bad * of.kv_heads * dim + 3)] = poison;
    if (!in_key) of.q[std::size_t(bad * of.shape.q_heads * dim + 3)] = poison;
    cache<method> kv(of.shape, configured({}, of.tokens - 1, 10), workers);
    kv.trace_ranked(true);
    const index_t id = kv.open();
    kv.prefill(0, id, of.rows(of.q, of.shape.q_heads, 0, of.tokens), of.rows(of.k, of.kv_heads, 0, of.tokens),
               of.rows(of.v, of.kv_heads, 0, of.tokens));
    kv.end_prefill(id);
    const auto& scores = kv.ranked(0, id).scores[0];
    for (index_t t = 4; t < of.tokens; ++t) REQUIRE(((in_key && t == bad) || std::isfinite(scores[std::size_t(t)])));
    const auto kept = kv.positions(0, id, 0);
    if (in_key) REQUIRE(std::find(kept.begin(), kept.end(), bad) == kept.end());
  }
}

TEST_CASE("of sinks alone the first stay, whatever their values") {
  rng random(1303);
  model_shape shape{1, 1, 1};
  shape.rope_frequencies.assign(half, 1.0f);
  cache<method> kv(shape, configured({.sinks = 60}, 3, 10), std::make_shared<cpu::executor>(1));
  const index_t id = kv.open();
  const std::vector<float> k = support::normals(random, 5 * dim), v(5 * dim, 0.0f);
  const auto rows = [&](const std::vector<float>& x) { return nhd_rows(x.data(), 5, 1, dim); };
  kv.prefill(0, id, rows(k), rows(k), rows(v));
  kv.end_prefill(id);
  CHECK(kv.positions(0, id, 0) == std::vector<index_t>{0, 1, 2});
}

TEST_CASE("expected_attention is refused without the model's RoPE") {
  const auto make = [](const model_shape& shape) {
    cache<method>(shape, method{}, std::make_shared<cpu::executor>(1));
  };
  CHECK_THROWS_WITH(make({1, 2, 1}), contains("rope_frequencies is 0; expected 32, one for each pair"));
  model_shape strange{1, 2, 1};
  strange.rope_frequencies.assign(half, infinity);
  CHECK_THROWS_WITH(make(strange), contains("rope_frequencies is inf; expected finite numbers"));
}
