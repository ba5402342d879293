// CriticalKV over random layers against double: half by attention, the rest by attention times what the value does.
#include "catch.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/budget/adaptive.hpp>
#include <tessera/cache.hpp>
#include <tessera/methods/criticalkv.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
using support::rng;
using support::scaled;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using scorer_type = weighted_by<observation_window, value_norm>;
static_assert(weighted_scorer<scorer_type> && pooling_scorer<scorer_type> && !weighted_scorer<observation_window>);

struct layer {
  index_t kv_heads, group, tokens, window, hidden;
  std::vector<float> q, k, v, projection;  // [window, q_heads, dim], [kv_heads, tokens, dim], [q_heads, dim, hidden]
  std::vector<index_t> lengths;

  layer(rng& random, index_t wanted)
      : kv_heads(random.between(1, 3)),
        group(random.between(1, 3)),
        tokens(random.between(1, 70)),
        window(std::min(wanted, tokens)),
        hidden(random.between(1, 20)) {
    q = support::normals(random, std::size_t(window * kv_heads * group * dim), 1.5f);
    k = support::normals(random, std::size_t(kv_heads * tokens * dim));
    v = support::normals(random, k.size(), 2);
    projection = support::normals(random, std::size_t(kv_heads * group * dim * hidden));
    lengths.assign(std::size_t(kv_heads), tokens);
  }
  choose_problem<kv_view<const float, dim>, float> problem(const index_t& first, bool projected) const {
    choose_problem<kv_view<const float, dim>, float> p;
    p.view.k = k.data();
    p.view.v = v.data();
    p.view.k_strides = p.view.v_strides = {0, offset_t(tokens) * dim, dim, 1};
    p.view.sequences = 1;
    p.view.kv_heads = kv_heads;
    p.view.lengths = lengths.data();
    p.view.length_strides = {0, 1};
    p.q = nhd_rows(q.data(), window, kv_heads * group, dim);
    p.first_position = &first;
    if (projected) p.projection = projection.data(), p.hidden = hidden;
    return p;
  }
  std::vector<double> attention(index_t head) const {
    std::vector<const float*> keys;
    std::vector<index_t> positions;
    for (index_t t = 0; t < tokens; ++t) keys.push_back(k.data() + (head * tokens + t) * dim), positions.push_back(t);
    std::vector<double> scores(std::size_t(tokens), 0.0);
    for (index_t row = 0; row < window; ++row) {
      for (index_t g = 0; g < group; ++g) {
        const index_t h = head * group + g;
        const auto seen = oracle::attend(q.data() + (row * kv_heads * group + h) * dim, tokens - window + row, keys, {},
                                         positions, dim, dim, {}, h);
        for (std::size_t t = 0; t < scores.size(); ++t) scores[t] += seen.probabilities[t];
      }
    }
    scores.resize(std::size_t(tokens - window));
    return scores;
  }
  double weight(index_t head, index_t token, bool projected) const {
    const float* value = v.data() + (head * tokens + token) * dim;
    double total = 0;
    for (int d = 0; d < dim && !projected; ++d) total += std::abs(double(value[d]));
    for (index_t g = 0; g < group && projected; ++g) {
      for (index_t c = 0; c < hidden; ++c) {
        double sum = 0;
        for (int d = 0; d < dim; ++d) {
          sum += double(value[d]) * double(projection[std::size_t(((head * group + g) * dim + d) * hidden + c)]);
        }
        total += std::abs(sum) / group;
      }
    }
    return total;
  }
};

bool close(const std::vector<double>& scores, index_t keep) {
  if (keep <= 0 || keep >= index_t(scores.size())) return false;
  const auto order = oracle::preference(scores);
  const double in = scores[std::size_t(order[std::size_t(keep - 1)])],
               out = scores[std::size_t(order[std::size_t(keep)])];
  return std::isfinite(in) && in != out && in - out <= 3e-5 * std::abs(in);
}

}  // namespace

TEST_CASE("a value whose norm overflows ranks its token last, not before all others") {
  const scorer_type scorer;
  CHECK(std::isnan(scorer.weighted(0.5f, infinity)));
  CHECK(std::isnan(scorer.weighted(2, std::numeric_limits<float>::max())));
  CHECK(scorer.weighted(0.5f, 0) == 0);
  CHECK(scorer.weighted(infinity, 0) == infinity);  // a sink stays before all others, whatever its value
}

TEST_CASE("criticalkv keeps half by attention and the rest by attention times the value's norm, projected or not") {
  rng random(5701);
  cpu::executor workers(2);
  cpu::choose_workspace<dim> workspace;
  selection kept;
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < scaled(1'000); ++i) {
    const index_t wanted = random.pick({1, 4, 8});
    const layer of(random, wanted);
    const bool projected = random.chance(0.5);
    retain<scorer_type, uniform, top_tokens> policy;
    policy.scorer.window = wanted;
    policy.scorer.pool = random.pick({1, 3, 7});
    policy.scorer.first = random.pick({0.0f, 0.25f, 0.5f, 0.5f, 1.0f});
    policy.budget.tokens = random.between(wanted, 75);
    const index_t first = of.tokens - of.window, keep = std::min(policy.budget.tokens, of.tokens);
    cpu::score_and_choose(policy, of.problem(first, projected), kept, workspace, workers);
    for (index_t h = 0; h < of.kv_heads; ++h) {
      const std::vector<index_t> got(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
      CAPTURE(i, h, of.tokens, keep, wanted, projected, policy.scorer.first, policy.scorer.pool);
      REQUIRE(index_t(got.size()) == keep);
      for (index_t t = 0; t < of.window && keep < of.tokens; ++t)
        REQUIRE(got[std::size_t(keep - 1 - t)] == of.tokens - 1 - t);
      if (keep == of.tokens) continue;
      auto scores = oracle::max_pool(of.attention(h), policy.scorer.pool);
      const index_t room = keep - of.window;
      index_t part = index_t(double(policy.scorer.first) * keep);
      if (policy.scorer.first > 0) part = std::max(part, 1);
      part = std::clamp(part - of.window, 0, room);
      const auto early = oracle::top_k(scores, part);
      bool near = close(scores, part);
      std::vector<double> weighed;
      for (index_t t = 0; t < first; ++t) {
        const bool taken = std::binary_search(early.begin(), early.end(), t);
        weighed.push_back(taken ? oracle::infinite : (scores[std::size_t(t)] + 1e-4) * of.weight(h, t, projected));
      }
      near |= close(weighed, room);
      ++compared;
      open += near;
      if (near) continue;
      REQUIRE(std::vector<index_t>(got.begin(), got.begin() + room) == oracle::top_k(weighed, room));
    }
  }
  INFO(compared << " compared, " << open << " open to rounding");
  CHECK(double(open) < 0.05 * double(compared) + 5);
}

TEST_CASE("a budget for which heads compete counts by the scores alone, before they are weighed") {
  rng random(5702);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  selection plain, weighed;
  for (index_t i = 0; i < scaled(200); ++i) {
    const layer of(random, 4);
    retain<observation_window, adaptive, top_tokens> alone;
    retain<scorer_type, adaptive, top_tokens> with;
    alone.scorer.window = with.scorer.window = 4;
    alone.budget.tokens = with.budget.tokens = random.between(4, 60);
    const index_t first = of.tokens - of.window;
    cpu::score_and_choose(alone, of.problem(first, false), plain, workspace, workers);
    cpu::score_and_choose(with, of.problem(first, false), weighed, workspace, workers);
    REQUIRE(plain.counts == weighed.counts);
  }
}

TEST_CASE("the engine's output projection reaches the layer that it is for") {
  rng random(5703);
  const layer of(random, 4);
  const index_t q_heads = of.kv_heads * of.group;
  model_shape shape{2, q_heads, of.kv_heads};
  std::vector<float> both(of.projection.size(), 0.0f);  // layer 0 projects everything to nothing
  both.insert(both.end(), of.projection.begin(), of.projection.end());
  shape.output_projection = both.data();
  CHECK_THROWS_WITH((cache<criticalkv<fp32, dim>>(shape, {}, std::make_shared<cpu::executor>(1))),
                    contains("hidden is 0; expected at least 1"));
  shape.hidden = of.hidden;
  criticalkv<fp32, dim> recipe;
  recipe.retain.scorer.window = 4;
  recipe.set_budget(std::max(5, of.tokens / 2));
  cache<criticalkv<fp32, dim>> kv(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = kv.open(), first = of.tokens - of.window;
  for (index_t l = 0; l < 2; ++l) {
    kv.prefill(l, id, nhd_rows<const float>(of.q.data(), of.window, q_heads, dim),
               hnd_rows<const float>(of.k.data(), of.tokens, of.kv_heads, dim),
               hnd_rows<const float>(of.v.data(), of.tokens, of.kv_heads, dim));
  }
  kv.end_prefill(id);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  selection kept;
  cpu::score_and_choose(recipe.retain, of.problem(first, true), kept, workspace, workers);
  for (index_t h = 0; h < of.kv_heads; ++h) {
    REQUIRE(kv.positions(1, id, h) == std::vector<index_t>(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]));
  }
}
