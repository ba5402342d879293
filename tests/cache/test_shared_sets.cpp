// One set for all heads of a layer, and for layers in a row: ChunkKV in a whole cache.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/chunkkv.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
using support::rng;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using method = chunkkv<fp32, dim>;

struct text {
  model_shape shape;
  std::vector<float> q, k;  // [layers, tokens, heads, dim]
  index_t tokens;

  text(rng& random, const model_shape& of, index_t count) : shape(of), tokens(count) {
    q = support::normals(random, std::size_t(of.layers * count * of.q_heads * dim), 1.5f);
    k = support::normals(random, std::size_t(of.layers * count * of.kv_heads * dim));
  }
  rows_view<const float> queries(index_t layer, index_t first, index_t count) const {
    return nhd_rows(q.data() + (layer * tokens + first) * shape.q_heads * dim, count, shape.q_heads, dim);
  }
  rows_view<const float> keys(index_t layer, index_t first, index_t count) const {
    return nhd_rows(k.data() + (layer * tokens + first) * shape.kv_heads * dim, count, shape.kv_heads, dim);
  }
  void prefill(cache<method>& kv, index_t id, index_t first, index_t count) const {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      kv.prefill(layer, id, queries(layer, first, count), keys(layer, first, count), keys(layer, first, count));
    }
  }
  /// By slot of `stored`: what the queries of the newest `rows` tokens give it, summed over all heads.
  std::vector<double> scores(index_t layer, index_t next, index_t rows, const std::vector<index_t>& stored) const {
    std::vector<double> sums(stored.size(), 0.0);
    for (index_t row = next - rows; row < next; ++row) {
      for (index_t h = 0; h < shape.q_heads; ++h) {
        std::vector<const float*> held;
        for (const index_t at : stored)
          held.push_back(keys(layer, at, 1).row(0, 0, h / (shape.q_heads / shape.kv_heads)));
        const auto seen = oracle::attend(queries(layer, row, 1).row(0, 0, h), row, held, {}, stored, dim, dim);
        for (std::size_t s = 0; s < sums.size(); ++s) sums[s] += seen.probabilities[s];
      }
    }
    return sums;
  }
};

cache<method> cache_of(const model_shape& shape, index_t budget, index_t window, index_t reuse, index_t dense = 0) {
  method recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.window = window;
  recipe.retain.scope.reuse = reuse;
  recipe.dense_layers = dense;
  return {shape, recipe, std::make_shared<cpu::executor>(1)};
}

}  // namespace

TEST_CASE("chunkkv keeps the best chunks of all heads together, over turns") {
  rng random(5601);
  index_t open = 0, compared = 0;
  for (index_t i = 0; i < support::scaled(500); ++i) {
    const index_t kv_heads = random.between(1, 3);
    const text of(random, {2, kv_heads * random.between(1, 2), kv_heads}, 150);
    const index_t window = random.pick({1, 4, 8}), budget = random.between(window, 60);
    auto kv = cache_of(of.shape, budget, window, 1);
    const index_t id = kv.open();
    std::vector<std::vector<index_t>> stored(2);
    index_t next = 0;
    for (int turn = 0; turn < 2; ++turn) {
      const index_t prompt = random.between(1, 75), rows = std::min(prompt, window);
      of.prefill(kv, id, next, prompt);
      for (auto& layer : stored) {
        for (index_t t = 0; t < prompt; ++t) layer.push_back(next + t);
      }
      next += prompt;
      kv.end_prefill(id);
      for (index_t layer = 0; layer < 2; ++layer) {
        auto& held = stored[std::size_t(layer)];
        const auto scores = of.scores(layer, next, rows, held);
        const auto choose = [&](double off) -> std::vector<index_t> {
          auto moved = scores;
          for (std::size_t s = 0; s < moved.size(); ++s) moved[s] *= 1 + off * double(s * 2654435761u % 1000);
          std::vector<index_t> kept;
          if (index_t(held.size()) <= budget) return held;
          for (const index_t slot : oracle::top_blocks(moved, rows, budget, 10))
            kept.push_back(held[std::size_t(slot)]);
          return kept;
        };
        const std::vector<index_t> expected = choose(0), got = kv.positions(layer, id, 0);
        const bool close = choose(1e-7) != expected || choose(-1e-7) != expected;
        CAPTURE(i, turn, layer, budget, window, prompt);
        for (index_t h = 1; h < kv_heads; ++h) REQUIRE(kv.positions(layer, id, h) == got);
        REQUIRE(got.size() == expected.size());
        if (!close) REQUIRE(got == expected);
        ++compared;
        open += close;
        held = got;
      }
    }
  }
  CHECK(double(open) < 0.1 * double(compared) + 5);
}

TEST_CASE("with reuse, layers in a row keep what the first of them chooses; dense layers stand aside") {
  rng random(5602);
  const model_shape shape{6, 4, 2};
  const text of(random, shape, 160);
  for (const index_t dense : {0, 1}) {
    for (const index_t reuse : {1, 2, 3, 100}) {
      CAPTURE(dense, reuse);
      auto shared = cache_of(shape, 30, 4, reuse, dense), alone = cache_of(shape, 30, 4, 1, dense);
      const index_t id = shared.open();
      REQUIRE(alone.open() == id);
      index_t next = 0;
      for (const index_t prompt : {90, 40}) {
        of.prefill(shared, id, next, prompt);
        of.prefill(alone, id, next, prompt);
        next += prompt;
        shared.end_prefill(id);
        alone.end_prefill(id);
        for (index_t layer = dense; layer < shape.layers; ++layer) {
          const index_t first = dense + (layer - dense) / reuse * reuse;
          CAPTURE(prompt, layer, first);
          for (index_t h = 0; h < shape.kv_heads; ++h) {
            REQUIRE(shared.positions(layer, id, h) == shared.positions(first, id, h));
            if (next == 90) REQUIRE(shared.positions(first, id, h) == alone.positions(first, id, h));
          }
        }
        if (dense) REQUIRE(shared.length(0, id, 0) == next);
      }
      if (reuse > 1) CHECK(shared.positions(dense + 1, id, 0) != alone.positions(dense + 1, id, 0));
    }
  }
  CHECK_THROWS_WITH(cache_of(shape, 30, 4, 0), contains("reuse is 0; expected 1 to 65536"));
}
