// Layers that differ in one cache: dense first, one that slides, and the recipe's, against attention in double.
#include "catch.hpp"

#include <tessera/cache.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/rocketkv_mt.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/streaming_llm.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

constexpr int dim = 64;
constexpr index_t layers = 4, q_heads = 4, kv_heads = 2, window = 24, most = 300;

/// Layers 0 and 1 are dense by setting, but 1 slides, as does 3; 2 follows the recipe.
const model_shape shape{layers, q_heads, kv_heads, window, {false, true, false, true}};

template <class Recipe>
void layers_do_their_own(std::uint64_t seed) {
  support::rng random(seed);
  const auto q = support::normals(random, std::size_t(layers * most * q_heads * dim)),
             k = support::normals(random, std::size_t(layers * most * kv_heads * dim)),
             v = support::normals(random, std::size_t(layers * most * kv_heads * dim));
  const auto rows = [](const std::vector<float>& from, index_t layer, index_t first, index_t count, index_t heads) {
    return nhd_rows<const float>(from.data() + (offset_t(layer) * most + first) * heads * dim, count, heads, dim);
  };
  Recipe recipe;
  recipe.set_budget(40);
  recipe.dense_layers = 2;
  cache<Recipe> held(shape, recipe, std::make_shared<cpu::executor>(2));
  held.trace_attended(true);
  const index_t id = held.open();
  index_t next = 0;
  const auto check_rows = [&](index_t layer, index_t first, index_t count, const std::vector<float>& out) {
    for (index_t t = 0; t < count; ++t) {
      for (index_t h = 0; h < q_heads; ++h) {
        const index_t head = h / (q_heads / kv_heads), at = first + t;
        std::vector<index_t> positions;
        if (shape.slides(layer)) {
          for (index_t p = std::max(0, at - window + 1); p <= at; ++p) positions.push_back(p);
        } else if (layer == 0) {
          for (index_t p = 0; p <= at; ++p) positions.push_back(p);
        } else {
          positions = held.attended(layer, id)[std::size_t(head)];
        }
        std::vector<const float*> keys, values;
        for (const index_t p : positions) {
          keys.push_back(k.data() + ((offset_t(layer) * most + p) * kv_heads + head) * dim);
          values.push_back(v.data() + ((offset_t(layer) * most + p) * kv_heads + head) * dim);
        }
        const auto want = support::oracle::attend(q.data() + ((offset_t(layer) * most + at) * q_heads + h) * dim, at,
                                                  keys, values, positions, dim, dim);
        CAPTURE(layer, at, h);
        REQUIRE(support::row_error(out.data() + (t * q_heads + h) * dim, want.out) < 1e-5);
      }
    }
  };
  for (const index_t prompt : {130, 40, 5}) {
    for (const index_t chunk : {prompt / 2, prompt - prompt / 2}) {
      for (index_t layer = 0; layer < layers; ++layer) {
        held.prefill(layer, id, rows(q, layer, next, chunk, q_heads), rows(k, layer, next, chunk, kv_heads),
                     rows(v, layer, next, chunk, kv_heads));
        std::vector<float> out(std::size_t(chunk * q_heads * dim));
        held.prefill_attention(layer, id, rows(q, layer, next, chunk, q_heads),
                               nhd_rows(out.data(), chunk, q_heads, dim));
        if (layer != 2) check_rows(layer, next, chunk, out);
      }
      next += chunk;
    }
    held.end_prefill(id);
    for (const index_t count : {1, 8, 1, 3, 1, 1, 8, 1, 1, 1}) {
      const batch step = held.prepare_step({id}, count);
      for (index_t layer = 0; layer < layers; ++layer) {
        std::vector<float> out(std::size_t(count * q_heads * dim));
        held.decode(layer, step, rows(q, layer, next, count, q_heads), rows(k, layer, next, count, kv_heads),
                    rows(v, layer, next, count, kv_heads), nhd_rows(out.data(), count, q_heads, dim));
        check_rows(layer, next, count, out);
      }
      next += count;
    }
    for (index_t head = 0; head < kv_heads; ++head) {
      CHECK(held.length(0, id, head) == next);
      CHECK(held.readable(0, id, head).size() == std::size_t(next));
      for (const index_t layer : {1, 3}) {  // at most a window, what is spare, and the last step
        CHECK(held.length(layer, id, head) <= window + 16 + 8);
        CHECK(held.positions(layer, id, head).back() == next - 1);
      }
    }
  }
}

}  // namespace

TEST_CASE("dense and sliding layers answer as they should beside layers of every kind of recipe") {
  layers_do_their_own<snapkv<fp32, dim>>(321);
  layers_do_their_own<streaming_llm<fp32, dim, dim, stored<dense_rows<fp32, dim>, fixed_pages<16>>>>(322);
  layers_do_their_own<quest<fp32, dim>>(323);
  layers_do_their_own<rocketkv_mt<fp32, dim>>(324);
}

TEST_CASE("a sliding layer holds a window's bytes, whatever the prompt's length") {
  cache<snapkv<fp32, dim>> held({1, q_heads, kv_heads, window, {true}}, {}, std::make_shared<cpu::executor>(1));
  const std::vector<float> rows(std::size_t(100 * q_heads * dim), 1.0f);
  const index_t id = held.open();
  for (int chunk = 0; chunk < 10; ++chunk) {
    held.prefill(0, id, nhd_rows<const float>(rows.data(), 100, q_heads, dim),
                 nhd_rows<const float>(rows.data(), 100, kv_heads, dim),
                 nhd_rows<const float>(rows.data(), 100, kv_heads, dim));
  }
  held.end_prefill(id);
  CHECK(held.bytes(id) <= held.full_bytes(window) + kv_heads * window * 4);
}

TEST_CASE("each layer has the sink logits that the model's shape gives it, in prompts and in steps") {
  constexpr index_t tokens = 20;
  support::rng random(77);
  const auto q = support::normals(random, std::size_t(tokens * q_heads * dim)),
             k = support::normals(random, std::size_t(tokens * kv_heads * dim)),
             v = support::normals(random, std::size_t(tokens * kv_heads * dim)),
             sinks = support::normals(random, std::size_t(2 * q_heads));
  const auto answers = [&](const float* sink_logits, index_t layer, std::vector<float>& lse) {
    cache<snapkv<fp32, dim>> held({2, q_heads, kv_heads, 8, {false, true}, sink_logits}, {},
                                  std::make_shared<cpu::executor>(1));
    const auto rows = [](const std::vector<float>& from, index_t first, index_t count, index_t heads) {
      return nhd_rows<const float>(from.data() + first * heads * dim, count, heads, dim);
    };
    const index_t id = held.open();
    std::vector<float> out(std::size_t(tokens * q_heads * dim)), unused(out.size());
    lse.resize(std::size_t(tokens * q_heads));
    for (index_t l = 0; l < 2; ++l) {
      held.prefill(l, id, rows(q, 0, tokens - 1, q_heads), rows(k, 0, tokens - 1, kv_heads),
                   rows(v, 0, tokens - 1, kv_heads));
    }
    held.prefill_attention(layer, id, rows(q, 0, tokens - 1, q_heads), nhd_rows(out.data(), tokens - 1, q_heads, dim),
                           nhd_rows(lse.data(), tokens - 1, q_heads, 1));
    held.end_prefill(id);
    const batch step = held.prepare_step({id}, 1);
    for (index_t l = 0; l < 2; ++l) {
      held.decode(l, step, rows(q, tokens - 1, 1, q_heads), rows(k, tokens - 1, 1, kv_heads),
                  rows(v, tokens - 1, 1, kv_heads),
                  nhd_rows((l == layer ? out : unused).data() + (tokens - 1) * q_heads * dim, 1, q_heads, dim),
                  l == layer ? nhd_rows(lse.data() + (tokens - 1) * q_heads, 1, q_heads, 1) : rows_view<float>{});
    }
    return out;
  };
  for (const index_t layer : {0, 1}) {
    std::vector<float> plain_lse, lse;
    const auto plain = answers(nullptr, layer, plain_lse), got = answers(sinks.data(), layer, lse);
    for (index_t row = 0; row < tokens * q_heads; ++row) {
      const double sink = sinks[std::size_t(layer * q_heads + row % q_heads)];
      const double share = 1 / (1 + std::exp(sink - plain_lse[std::size_t(row)]));  // what a sink leaves of a row
      std::vector<double> want;
      for (int d = 0; d < dim; ++d) want.push_back(plain[std::size_t(row * dim + d)] * share);
      CAPTURE(layer, row);
      REQUIRE(support::row_error(got.data() + row * dim, want) < 1e-5);
    }
  }
}
