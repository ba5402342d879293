// KVzip's cache against double: what a text that is read again looks at, one threshold over all layers and heads.
#include "catch.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/kvzip.hpp>

#include "laws/policies.hpp"
#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::rng;
using support::scaled;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;
using method = kvzip<fp32, dim>;
static_assert(runs_on_devices<method> && method::retain_type::rereads && method::retain_type::over_model);

/// Tokens of one layer: q [tokens, q_heads, dim], k and v [tokens, kv_heads, dim].
struct rows {
  index_t q_heads, kv_heads, tokens;
  std::vector<float> q, k, v;
  rows(rng& random, const model_shape& shape, index_t count)
      : q_heads(shape.q_heads),
        kv_heads(shape.kv_heads),
        tokens(count),
        q(support::normals(random, std::size_t(count * shape.q_heads * dim), 1.5f)),
        k(support::normals(random, std::size_t(count * shape.kv_heads * dim))),
        v(support::normals(random, std::size_t(count * shape.kv_heads * dim))) {}
  const float* query(index_t t, index_t h) const { return q.data() + (t * q_heads + h) * dim; }
  const float* key(index_t t, index_t h) const { return k.data() + (t * kv_heads + h) * dim; }
  const float* value(index_t t, index_t h) const { return v.data() + (t * kv_heads + h) * dim; }
};

rows_view<const float> view(const std::vector<float>& x, index_t heads, index_t first, index_t count) {
  return nhd_rows(x.data() + offset_t(first) * heads * dim, count, heads, dim);
}

/// A part of the prompt, and the rows that read it again, by layer.
struct part {
  index_t first, count;
  std::vector<rows> again;
};

cache<method> cache_of(const model_shape& shape, index_t budget, index_t sinks) {
  method recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.sinks = sinks;
  return {shape, recipe, std::make_shared<cpu::executor>(2)};
}

}  // namespace

TEST_CASE("reconstruction keeps the laws of scorers, and its sinks first") {
  support::obeys_the_laws_of_scorers(reconstruction{});
  const float scores[] = {0.5f, 0.25f, 0.75f};
  CHECK(reconstruction{.sinks = 2}.finish_at(scores, 3, 1) == infinity);
  CHECK(reconstruction{.sinks = 2}.finish_at(scores, 3, 2) == 0.75f);
}

TEST_CASE("kvzip keeps what the re-reading looks at most, over all layers and heads") {
  rng random(1331);
  index_t open = 0;
  const index_t shapes = scaled(1'000);
  for (index_t i = 0; i < shapes; ++i) {
    const index_t kv_heads = random.between(1, 3), group = random.between(1, 2), layers = random.between(1, 3);
    const model_shape shape{layers, kv_heads * group, kv_heads};
    const index_t tokens = random.between(1, 50), budget = random.between(1, 40), sinks = random.between(0, 4);
    CAPTURE(i, layers, kv_heads, group, tokens, budget, sinks);
    std::vector<rows> prompt;
    for (index_t layer = 0; layer < layers; ++layer) prompt.emplace_back(random, shape, tokens);
    std::vector<part> parts;
    for (index_t done = 0; done < tokens;) {
      part next{done, random.between(1, tokens - done), {}};
      const index_t again = next.count + random.between(0, 5);
      for (index_t layer = 0; layer < layers; ++layer) next.again.emplace_back(random, shape, again);
      done += next.count;
      parts.push_back(std::move(next));
    }
    auto kv = cache_of(shape, budget, sinks);
    const index_t id = kv.open();
    for (index_t done = 0; done < tokens;) {
      const index_t chunk = random.between(1, tokens - done);
      for (index_t layer = 0; layer < layers; ++layer) {
        const rows& all = prompt[std::size_t(layer)];
        kv.prefill(layer, id, rows_view<const float>{}, view(all.k, kv_heads, done, chunk),
                   view(all.v, kv_heads, done, chunk));
      }
      done += chunk;
    }
    std::vector<double> scores(std::size_t(layers * kv_heads * tokens), 0.0);
    for (const part& of : parts) {
      for (index_t layer = 0; layer < layers; ++layer) {
        const rows &all = prompt[std::size_t(layer)], &again = of.again[std::size_t(layer)];
        std::vector<float> out(again.q.size());
        kv.reread(layer, id, of.first, of.count, view(again.q, shape.q_heads, 0, again.tokens),
                  view(again.k, kv_heads, 0, again.tokens), view(again.v, kv_heads, 0, again.tokens),
                  nhd_rows(out.data(), again.tokens, shape.q_heads, dim));
        for (index_t h = 0; h < shape.q_heads; ++h) {
          const index_t head = h / group;
          std::vector<const float*> keys, values, seen;
          std::vector<index_t> everywhere, positions;
          for (index_t t = 0; t < tokens + again.tokens; ++t) {
            const bool own = t >= tokens;
            keys.push_back(own ? again.key(t - tokens, head) : all.key(t, head));
            values.push_back(own ? again.value(t - tokens, head) : all.value(t, head));
            everywhere.push_back(t);
            if (!own && t >= sinks && (t < of.first || t >= of.first + of.count)) continue;
            seen.push_back(keys.back());
            positions.push_back(t);
          }
          for (index_t row = 0; row < again.tokens; ++row) {
            const auto attended = oracle::attend(again.query(row, h), tokens + row, keys, values, everywhere, dim, dim);
            REQUIRE(support::row_error(out.data() + (row * shape.q_heads + h) * dim, attended.out) < 1e-5);
            const auto looked = oracle::attend(again.query(row, h), tokens + row, seen, {}, positions, dim, dim);
            for (std::size_t s = 0; s < positions.size(); ++s) {
              if (positions[s] < of.first || positions[s] >= of.first + of.count) continue;
              double& score = scores[std::size_t((layer * kv_heads + head) * tokens + positions[s])];
              score = std::max(score, looked.probabilities[s]);
            }
          }
        }
      }
    }
    REQUIRE(kv.next_position(id) == tokens);
    kv.end_prefill(id);
    for (index_t row = 0; row < layers * kv_heads; ++row) {
      for (index_t t = 0; t < std::min(sinks, tokens); ++t) scores[std::size_t(row * tokens + t)] = oracle::infinite;
    }
    const index_t places = std::min(budget, tokens) * layers * kv_heads;
    const auto order = oracle::preference(scores);
    const double last = scores[std::size_t(order[std::size_t(places - 1)])];
    bool close = false;
    for (const double score : scores)
      close |= score != last && std::isfinite(score) && std::isfinite(last) && std::abs(score - last) <= 3e-5 * last;
    open += close;
    for (index_t row = 0; row < layers * kv_heads && !close; ++row) {
      std::vector<index_t> expected;
      for (index_t place = 0; place < places; ++place) {
        if (order[std::size_t(place)] / tokens == row) expected.push_back(order[std::size_t(place)] % tokens);
      }
      std::sort(expected.begin(), expected.end());
      REQUIRE(kv.positions(row / kv_heads, id, row % kv_heads) == expected);
    }
  }
  CHECK(double(open) < 0.05 * double(shapes) + 5);
}

TEST_CASE("a text is read again between a prompt's last chunk and its end, and leaves nothing behind") {
  rng random(1332);
  const model_shape shape{1, 2, 1};
  auto kv = cache_of(shape, 8, 0);
  const index_t id = kv.open();
  const rows all(random, shape, 20);
  std::vector<float> out(all.q.size());
  const auto reread = [&](index_t first, index_t count, index_t keys) {
    kv.reread(0, id, first, count, view(all.q, 2, 0, 5), view(all.k, 1, 0, keys), view(all.v, 1, 0, keys),
              nhd_rows(out.data(), 5, 2, dim));
  };
  CHECK_THROWS_WITH(reread(0, 5, 5), contains("tokens of this turn is 0"));
  kv.prefill(0, id, rows_view<const float>{}, view(all.k, 1, 0, 20), view(all.v, 1, 0, 20));
  const offset_t before = kv.bytes(id);
  CHECK_THROWS_WITH(reread(15, 6, 5), contains("tokens that are read again is 6 from 15; expected some of 20"));
  CHECK_THROWS_WITH(reread(-1, 5, 5), contains("tokens that are read again"));
  CHECK_THROWS_WITH(reread(0, 5, 4), contains("one for each key"));
  reread(4, 8, 5);
  CHECK(kv.length(0, id, 0) == 20);
  CHECK(kv.bytes(id) <= before + 20 * (2 * dim + 2) * 4);  // room to grow
  kv.end_prefill(id);
  std::vector<index_t> expected;
  for (index_t t = 4; t < 12; ++t) expected.push_back(t);  // what was not read again goes first
  CHECK(kv.positions(0, id, 0) == expected);
  CHECK_THROWS_WITH(reread(4, 4, 5), contains("tokens of this turn is 0"));
}
