// How query rows become one score: sum, mean or maximum of a window's, and heads joined after them, against double.
#include "catch.hpp"

#include <cmath>
#include <vector>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scope/per_layer.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
constexpr index_t kv_heads = 2, group = 3, q_heads = kv_heads * group, tokens = 40, window = 5;

template <row_join Rows>
struct joined_window : observation_window {
  static constexpr row_join rows = Rows;
};

struct data {
  std::vector<float> q, k;
  explicit data(support::rng& random)
      : q(support::normals(random, std::size_t(window * q_heads * dim), 1.5f)),
        k(support::normals(random, std::size_t(kv_heads * tokens * dim))) {}

  std::vector<double> row(index_t t, index_t h) const {
    std::vector<const float*> keys;
    std::vector<index_t> positions;
    for (index_t i = 0; i < tokens; ++i)
      keys.push_back(k.data() + (h / group * tokens + i) * dim), positions.push_back(i);
    return oracle::attend(q.data() + (t * q_heads + h) * dim, tokens - window + t, keys, {}, positions, dim, dim, {}, h)
        .probabilities;
  }
};

template <class Scorer, class Scope>
std::vector<float> scored(const data& of, index_t head) {
  retain<Scorer, uniform, top_tokens, Scope> policy;
  policy.scorer.window = window;
  policy.scorer.pool = 1;
  policy.budget.tokens = tokens - 1;
  choose_problem<kv_view<const float, dim>, float> p;
  const index_t first = tokens - window, length = tokens;
  p.view.k = p.view.v = of.k.data();
  p.view.k_strides = p.view.v_strides = {0, tokens * dim, dim, 1};
  p.view.sequences = 1;
  p.view.kv_heads = kv_heads;
  p.view.lengths = &length;
  p.q = nhd_rows(of.q.data(), window, q_heads, dim);
  p.first_position = &first;
  selection kept;
  cpu::choose_workspace<dim> workspace;
  cpu::executor workers(1);
  const auto seen = cpu::score_and_choose(policy, p, kept, workspace, workers);
  return {seen.head(head), seen.head(head) + seen.candidates(head)};
}

/// The same in double; `heads`: from which head to which.
template <class Join>
std::vector<double> expected(const data& of, index_t first_head, index_t end_head, const Join& join) {
  std::vector<double> scores(std::size_t(tokens - window), 0.0);
  for (index_t t = 0; t < window; ++t) {
    for (index_t h = first_head; h < end_head; ++h) {
      const auto row = of.row(t, h);
      for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = join(scores[i], row[i]);
    }
  }
  return scores;
}

void same(const std::vector<float>& got, const std::vector<double>& wanted, double divisor) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    REQUIRE(double(got[i]) == Approx(wanted[i] / divisor).epsilon(1e-4).margin(1e-9));
  }
}

}  // namespace

TEST_CASE("rows of a window join by sum, mean or maximum, and heads of a layer after them") {
  support::rng random(5801);
  const auto add = [](double a, double b) { return a + b; };
  const auto most = [](double a, double b) { return std::max(a, b); };
  using total = joined_window<row_join::sum>;
  using mean = joined_window<row_join::mean>;
  using largest = joined_window<row_join::maximum>;
  for (int i = 0; i < 20; ++i) {
    const data of(random);
    for (index_t h = 0; h < kv_heads; ++h) {
      same(scored<total, per_head>(of, h), expected(of, h * group, (h + 1) * group, add), 1);
      same(scored<mean, per_head>(of, h), expected(of, h * group, (h + 1) * group, add), window * group);
      same(scored<largest, per_head>(of, h), expected(of, h * group, (h + 1) * group, most), 1);
      // Every head sees the layer's row.
      same(scored<total, per_layer<over_heads::sum>>(of, h), expected(of, 0, q_heads, add), 1);
      same(scored<total, per_layer<over_heads::mean>>(of, h), expected(of, 0, q_heads, add), q_heads);
      same(scored<mean, per_layer<over_heads::mean>>(of, h), expected(of, 0, q_heads, add), window * q_heads);
      same(scored<largest, per_layer<over_heads::maximum>>(of, h), expected(of, 0, q_heads, most), 1);
    }
  }
}

TEST_CASE("a logit that is no number ranks its token last, whatever rows come behind it") {
  support::rng random(5802);
  for (int i = 0; i < 10; ++i) {
    data of(random);
    const std::size_t odd = 7;
    for (index_t h = 0; h < kv_heads; ++h) of.k[(std::size_t(h) * tokens + odd) * dim] = infinity;
    for (index_t row = 0; row < window * q_heads; ++row) {
      float& x = of.q[std::size_t(row * dim)];
      x = row < q_heads ? 1.0f + std::abs(x) : -1.0f - std::abs(x);  // +infinity first, -infinity in later rows
    }
    for (index_t h = 0; h < kv_heads; ++h) {
      for (const auto& scores : {scored<joined_window<row_join::sum>, per_head>(of, h),
                                 scored<joined_window<row_join::maximum>, per_head>(of, h)}) {
        for (std::size_t t = 0; t < scores.size(); ++t) {
          CAPTURE(i, h, t, scores[t]);
          REQUIRE((t == odd ? !(scores[t] > -infinity) : scores[t] >= 0));
        }
      }
    }
  }
}
