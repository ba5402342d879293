// One set of tokens for a model: what layers add up to, compared with double, and what is chosen by it.
#include "catch.hpp"

#include <cmath>

#include <tessera/backend/cpu/choose/model_scores.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scope/per_head.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

#include "support/kv_tensor.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using stage = retain<observation_window, uniform, top_tokens, per_head>;

std::vector<index_t> chosen(const stage& policy, const auto& all) {
  selection kept;
  cpu::retain_workspace workspace;
  all.choose(policy, kept, workspace);
  REQUIRE(kept.rows() == 1);
  return {kept.row(0), kept.row(0) + kept.counts[0]};
}

/// The layers of a model in which every head has the same slots, and the last queries of a prompt.
struct observed_model {
  index_t heads, group, tokens, window;
  std::vector<support::kv_tensor<fp32, dim>> layers;
  std::vector<std::vector<float>> queries;

  observed_model(support::rng& random, index_t count)
      : heads(random.between(1, 3)),
        group(random.between(1, 4)),
        tokens(random.pick({1, 2, 33, 100, 700})),
        window(std::min(tokens, random.between(1, 40))) {
    for (index_t layer = 0; layer < count; ++layer) {
      layers.emplace_back(random, 1, heads, std::vector<index_t>(std::size_t(heads), tokens));
      queries.push_back(support::normals(random, std::size_t(window * heads * group * dim)));
    }
  }
  auto problem(index_t layer, const index_t* first) const {
    choose_problem<decltype(layers[0].view()), float> result;
    result.view = layers[std::size_t(layer)].view();
    result.q = nhd_rows(queries[std::size_t(layer)].data(), window, heads * group, dim);
    result.first_position = first;
    return result;
  }
  /// The weights that one kv_head's queries give, in double.
  std::vector<double> weights(index_t layer, index_t head) const {
    const auto& kv = layers[std::size_t(layer)];
    std::vector<const float*> keys;
    std::vector<index_t> positions;
    for (index_t slot = 0; slot < tokens; ++slot)
      keys.push_back(kv.k_float.data() + kv.row(0, head, slot) * dim), positions.push_back(slot);
    std::vector<double> sum(std::size_t(tokens), 0.0);
    for (index_t row = 0; row < window; ++row) {
      for (index_t g = 0; g < group; ++g) {
        const float* q = queries[std::size_t(layer)].data() + ((row * heads + head) * group + g) * dim;
        const auto seen = oracle::attend(q, tokens - window + row, keys, keys, positions, dim, dim);
        for (std::size_t i = 0; i < seen.probabilities.size(); ++i) sum[i] += seen.probabilities[i];
      }
    }
    return sum;
  }
};

}  // namespace

TEST_CASE("one set for a model is what the definition says, ties and NaN included") {
  support::rng random(511);
  for (index_t i = 0; i < support::scaled(3'000); ++i) {
    const index_t n = random.between(0, 100), tail = random.between(0, 20), budget = random.between(1, 120);
    cpu::model_scores<over_heads::sum> sums;
    cpu::model_scores<over_heads::maximum> largest;
    sums.begin(n), largest.begin(n);
    std::vector<double> sum(std::size_t(n), 0.0), most(std::size_t(n), -INFINITY);
    std::vector<bool> has_number(std::size_t(n), false);
    for (index_t layer = random.between(1, 5); layer > 0; --layer) {
      std::vector<std::vector<float>> heads;
      for (index_t h = random.between(1, 4); h > 0; --h) {
        heads.push_back(support::tied_scores(random, n, random.pick({1, 2, 5, 50})));
        for (auto& score : heads.back()) score = random.chance(0.02) ? std::nanf("") : score;
        for (std::size_t t = 0; t < heads.back().size(); ++t) {
          sum[t] += heads.back()[t];
          if (!std::isnan(heads.back()[t])) most[t] = std::max(most[t], double(heads.back()[t])), has_number[t] = true;
        }
      }
      const support::owned_scores raw(heads);
      sums.add(raw.view(tail, 3, 9)), largest.add(raw.view(tail, 3, 9));
    }
    for (std::size_t t = 0; t < most.size(); ++t) most[t] = has_number[t] ? most[t] : std::nan("");
    stage policy;
    policy.scorer.window = std::max(1, tail), policy.scorer.pool = random.pick({1, 3, 7});
    policy.budget.tokens = budget;
    CAPTURE(i, n, tail, budget, policy.scorer.pool);
    const auto by_definition = [&](std::vector<double> scores) {
      scores.resize(scores.size() - std::size_t(std::min(tail, n)));
      scores = oracle::max_pool(scores, policy.scorer.pool);
      scores.resize(std::size_t(n), 0.0);
      return oracle::top_tokens(scores, tail, std::clamp(budget, std::min(tail, n), n));
    };
    REQUIRE(chosen(policy, sums) == by_definition(sum));
    REQUIRE(chosen(policy, largest) == by_definition(most));
  }
}

TEST_CASE("a layer is scored whatever the budget, and layers add up to what double says") {
  support::rng random(512);
  cpu::executor workers(2);
  cpu::choose_workspace<dim> workspace;
  for (index_t i = 0; i < support::scaled(40); ++i) {
    const index_t count = random.between(1, 4);
    const observed_model model(random, count);
    const index_t first = model.tokens - model.window;
    stage policy;
    policy.scorer.window = model.window;
    policy.budget.tokens = random.pick({1, 50, 100'000});
    CAPTURE(i, model.heads, model.group, model.tokens, model.window, policy.budget.tokens);
    cpu::model_scores<> all;
    all.begin(model.tokens);
    std::vector<double> expected(std::size_t(model.tokens), 0.0);
    for (index_t layer = 0; layer < count; ++layer) {
      const auto problem = model.problem(layer, &first);
      const layer_scores scores = cpu::score_layer(policy, problem, workspace, workers);
      REQUIRE(scores.protected_tail == model.window);
      for (index_t head = 0; head < model.heads; ++head) {
        const std::vector<double> weights = model.weights(layer, head);
        for (index_t t = 0; t < model.tokens; ++t) {
          REQUIRE(support::number_error(scores.head(head)[t], weights[std::size_t(t)]) < 1e-5);
          expected[std::size_t(t)] += weights[std::size_t(t)];
        }
      }
      all.add(scores);
    }
    REQUIRE(all.layers() == count);
    for (index_t t = 0; t < model.tokens; ++t)
      REQUIRE(support::number_error(all.scores()[t], expected[std::size_t(t)]) < 1e-5);
  }
}

TEST_CASE("one layer of one head chooses what score_and_choose chooses, with the same bits") {
  support::rng random(513);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(60); ++i) {
    observed_model model(random, 1);
    const index_t first = model.tokens - model.window;
    retain<observation_window, uniform, top_tokens, per_layer<over_heads::sum>> policy;
    policy.scorer.window = model.window, policy.scorer.pool = random.pick({1, 7});
    policy.budget.tokens = random.between(model.window, model.window + 60);
    const auto problem = model.problem(0, &first);
    cpu::choose_workspace<dim> one, other;
    selection expected, got;
    cpu::score_and_choose(policy, problem, expected, one, workers);
    cpu::model_scores<> all;
    all.begin(model.tokens);
    all.add(cpu::score_layer(policy, problem, other, workers));
    cpu::retain_workspace retaining;
    all.choose(policy, got, retaining);
    REQUIRE(got.counts[0] == expected.counts[0]);
    REQUIRE(std::equal(got.row(0), got.row(0) + got.counts[0], expected.row(0)));
  }
}

TEST_CASE("scores of a model say what they take, and a refused layer adds nothing") {
  const support::owned_scores three({{1, 2, 3}}), four({{1, 2, 3, 4}}), uneven({{1, 2, 3}, {1, 2}});
  cpu::model_scores<> all;
  selection kept;
  cpu::retain_workspace workspace;
  CHECK_THROWS_WITH(all.begin(-1), contains("tokens is -1; expected at least 0; "));
  all.begin(3);
  CHECK_THROWS_WITH(all.choose(stage(), kept, workspace), contains("layers of the scores is 0; expected at least 1; "));
  all.add(three.view(1));
  CHECK_THROWS_WITH(all.add(four.view(1)), contains("slots of kv_head 0 is 4; expected 3, with which the sum began; "));
  CHECK_THROWS_WITH(all.add(uneven.view(1)), contains("slots of kv_head 1 is 2; expected 3, "));
  CHECK_THROWS_WITH(all.add(three.view(2)), contains("newest tokens that stay is 2; expected 1, "));
  CHECK(all.layers() == 1);
  CHECK((all.scores()[0] == 1 && all.scores()[1] == 2 && all.scores()[2] == 3));
  support::rng random(514);
  support::kv_tensor<fp32, dim> two(random, 2, 1, {5, 5});
  choose_problem<decltype(two.view()), float> problem;
  problem.view = two.view();
  cpu::choose_workspace<dim> memory;
  cpu::executor workers(1);
  CHECK_THROWS_WITH(cpu::score_layer(stage(), problem, memory, workers),
                    contains("sequences of the problem is 2; expected 1; "));
}
