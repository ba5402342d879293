// Segments in a whole cache: what an engine must hand over, and that they outlast evictions, steps and turns.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/sablock.hpp>
#include <tessera/methods/snapkv.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

namespace {

constexpr int dim = 64;
const model_shape shape{2, 4, 2};

struct text {
  index_t tokens;
  std::vector<float> q, k, v;
  std::vector<std::uint8_t> flags;

  text(rng& random, index_t count) : tokens(count) {
    q = support::normals(random, std::size_t(count * shape.q_heads * dim), 1.5f);
    k = support::normals(random, std::size_t(count * shape.kv_heads * dim));
    v = support::normals(random, k.size());
    for (index_t t = 0; t < count; ++t) flags.push_back(random.chance(0.15));
  }
  rows_view<const float> rows(const std::vector<float>& x, index_t heads, index_t first, index_t count) const {
    return nhd_rows(x.data() + first * heads * dim, count, heads, dim);
  }
};

template <class Recipe>
void prefill(cache<Recipe>& kv, index_t layer, index_t id, const text& of, index_t first, index_t count,
             std::span<const std::uint8_t> flags) {
  kv.prefill(layer, id, of.rows(of.q, shape.q_heads, first, count), of.rows(of.k, shape.kv_heads, first, count),
             of.rows(of.v, shape.kv_heads, first, count), flags);
}

template <class Recipe>
void step(cache<Recipe>& kv, index_t id, const text& of, index_t at) {
  std::vector<float> out(std::size_t(shape.q_heads * dim));
  const batch now = kv.prepare_step({id}, 1);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    kv.decode(layer, now, of.rows(of.q, shape.q_heads, at, 1), of.rows(of.k, shape.kv_heads, at, 1),
              of.rows(of.v, shape.kv_heads, at, 1), nhd_rows(out.data(), 1, shape.q_heads, dim));
  }
}

template <class Recipe>
cache<Recipe> cache_of(index_t budget) {
  Recipe recipe;
  recipe.set_budget(budget);
  return {shape, recipe, std::make_shared<cpu::executor>(1)};
}

using blocks = sablock<fp32, dim>;

}  // namespace

TEST_CASE("boundaries that are missing, short, long or no flags are refused before anything changes") {
  rng random(5401);
  const text of(random, 60);
  auto kv = cache_of<blocks>(40);
  const index_t id = kv.open();
  const auto refused = [&](std::vector<std::uint8_t> flags, const std::string& words) {
    CHECK_THROWS_WITH(prefill(kv, 0, id, of, 0, 60, flags), contains(words));
    CHECK(kv.next_position(id) == 0);
    CHECK(kv.length(0, id, 0) == 0);
  };
  refused({}, "boundaries is 0; expected one flag for each new token, which are 60");
  refused(std::vector<std::uint8_t>(59, 0), "boundaries is 59");
  refused(std::vector<std::uint8_t>(61, 0), "boundaries is 61");
  auto flags = of.flags;
  flags[7] = 2;
  refused(flags, "boundaries[7] is 2; expected 0 or 1");
  for (index_t layer = 0; layer < shape.layers; ++layer) prefill(kv, layer, id, of, 0, 60, of.flags);
  kv.end_prefill(id);
  CHECK(kv.length(0, id, 0) == 40);
}

TEST_CASE("a recipe that sees no segments looks at no flag") {
  rng random(5402);
  const text of(random, 60);
  auto with = cache_of<snapkv<fp32, dim>>(40), without = cache_of<snapkv<fp32, dim>>(40);
  const index_t id = with.open();
  REQUIRE(without.open() == id);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    prefill(with, layer, id, of, 0, 60, std::vector<std::uint8_t>{7, 7});
    prefill(without, layer, id, of, 0, 60, {});
  }
  with.end_prefill(id);
  without.end_prefill(id);
  CHECK(with.bytes(id) == without.bytes(id));
  for (index_t h = 0; h < shape.kv_heads; ++h) CHECK(with.positions(1, id, h) == without.positions(1, id, h));
}

TEST_CASE("segments are those of the whole text after evictions, steps and turns, in any chunks") {
  rng random(5403);
  cpu::executor workers(1);
  cpu::choose_workspace<dim> workspace;
  for (index_t i = 0; i < support::scaled(100); ++i) {
    const text of(random, 900);
    const index_t budget = random.between(12, 60);
    auto kv = cache_of<blocks>(budget);
    const auto policy = kv.recipe().retain;
    const index_t id = kv.open(), window = policy.scorer.window;
    // The segment of every token of the conversation; a decoded token brings no flag.
    std::vector<index_t> segments;
    segment_cursor cursor;
    std::vector<std::vector<index_t>> stored(std::size_t(shape.layers));  // positions, of each head, by layer
    index_t next = 0;
    for (int turn = 0; turn < 3; ++turn) {
      const index_t prompt = random.pick({1, 5, 40, 200, 280}), steps = random.between(0, 20);
      for (index_t done = 0; done < prompt;) {
        const index_t chunk = random.between(1, prompt - done);
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          prefill(kv, layer, id, of, next + done, chunk, {of.flags.data() + next + done, std::size_t(chunk)});
        }
        done += chunk;
      }
      for (index_t t = 0; t < prompt; ++t) {
        segments.push_back(cursor.advance(of.flags[std::size_t(next + t)] == 1));
        for (auto& layer : stored) layer.push_back(next + t);
      }
      next += prompt;
      kv.end_prefill(id);
      // What the first stage keeps of the same tokens, handed over by themselves.
      const index_t rows = std::min(prompt, window), first = next - rows;
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        auto& held = stored[std::size_t(layer)];
        const index_t n = index_t(held.size());
        std::vector<float> keys;
        std::vector<index_t> ids;
        for (index_t h = 0; h < shape.kv_heads; ++h) {
          for (const index_t at : held) {
            const float* row = of.k.data() + (at * shape.kv_heads + h) * dim;
            keys.insert(keys.end(), row, row + dim);
            ids.push_back(segments[std::size_t(at)]);
          }
        }
        choose_problem<kv_view<const float, dim>, float> p;
        p.view.k = p.view.v = keys.data();
        p.view.k_strides = p.view.v_strides = {0, offset_t(n) * dim, dim, 1};
        p.view.sequences = 1;
        p.view.kv_heads = shape.kv_heads;
        p.view.lengths = &n;
        p.view.positions = held.data();
        p.q = of.rows(of.q, shape.q_heads, first, rows);
        p.first_position = &first;
        p.layer = layer;
        p.layers = shape.layers;
        p.segments = {ids.data(), 0, n, nullptr};
        selection kept;
        cpu::score_and_choose(policy, p, kept, workspace, workers);
        std::vector<index_t> expected;
        for (index_t s = 0; s < kept.counts[0]; ++s) expected.push_back(held[std::size_t(kept.row(0)[s])]);
        CAPTURE(i, turn, layer, budget, prompt);
        for (index_t h = 0; h < shape.kv_heads; ++h) REQUIRE(kv.positions(layer, id, h) == expected);
        held = expected;
      }
      for (index_t s = 0; s < steps; ++s, ++next) {
        step(kv, id, of, next);
        segments.push_back(cursor.advance(false));
        for (auto& layer : stored) layer.push_back(next);
      }
    }
  }
}
