// Chunks of prompts and steps in one call, rows packed: what each item would do alone, bit for bit.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/layout/fixed_pages.hpp>
#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/sablock.hpp>
#include <tessera/methods/sentencekv.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::rng;

namespace {

constexpr index_t dim = 64;
const model_shape shape{2, 4, 2};

/// Packed rows of q, k and v for every layer.
struct packed_rows_of_layers {
  struct rows {
    std::vector<float> q, k, v, out, lse;
  };
  std::vector<rows> layers;
  index_t tokens;

  packed_rows_of_layers(rng& random, index_t count) : tokens(count) {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      layers.push_back({normals(random, count * shape.q_heads * dim), normals(random, count * shape.kv_heads * dim),
                        normals(random, count * shape.kv_heads * dim),
                        std::vector<float>(std::size_t(count * shape.q_heads * dim), 7.0f),
                        std::vector<float>(std::size_t(count * shape.q_heads), 7.0f)});
    }
  }
  auto q(index_t layer) const { return nhd_rows(layers[std::size_t(layer)].q.data(), tokens, shape.q_heads, dim); }
  auto k(index_t layer) const { return nhd_rows(layers[std::size_t(layer)].k.data(), tokens, shape.kv_heads, dim); }
  auto v(index_t layer) const { return nhd_rows(layers[std::size_t(layer)].v.data(), tokens, shape.kv_heads, dim); }
  auto out(index_t layer) { return nhd_rows(layers[std::size_t(layer)].out.data(), tokens, shape.q_heads, dim); }
  auto lse(index_t layer) { return nhd_rows(layers[std::size_t(layer)].lse.data(), tokens, shape.q_heads, 1); }
};

template <class Rows>
Rows part(Rows rows, index_t first, index_t tokens) {
  rows.data += offset_t(first) * rows.token_stride;
  rows.tokens = tokens;
  return rows;
}

/// Random batches of up to five sequences, in one cache by items and in another one by the calls of each item alone.
template <class Recipe>
void as_alone(std::uint64_t seed) {
  CAPTURE(Recipe::name, seed);
  rng random(seed);
  Recipe recipe;
  recipe.set_budget(40);
  if constexpr (requires { recipe.retain.scorer.window; }) recipe.retain.scorer.window = 8;
  const auto workers = std::make_shared<cpu::executor>(1);
  cache<Recipe> mixed(shape, recipe, workers), alone(shape, recipe, workers);
  constexpr index_t sequences = 5;
  bool in_prompt[sequences];
  for (index_t id = 0; id < sequences; ++id) {
    REQUIRE(mixed.open() == alone.open());
    in_prompt[id] = true;
  }
  for (int round = 0; round < 12; ++round) {
    host_vector<batch_item> items;
    host_vector<index_t> ids{0, 1, 2, 3, 4};
    for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[std::size_t(random.between(0, int(i) - 1))]);
    ids.resize(std::size_t(random.between(1, sequences)));
    for (const index_t id : ids) {
      if (!in_prompt[id]) in_prompt[id] = random.chance(0.15);
      items.push_back({id, in_prompt[id] ? random.between(1, 60) : random.between(1, 8), in_prompt[id]});
    }
    index_t total = 0;
    for (const batch_item& item : items) total += item.tokens;
    packed_rows_of_layers rows(random, total), expected = rows;
    std::vector<std::uint8_t> ends(std::size_t(total), 0);
    for (std::uint8_t& end : ends) end = random.chance(0.1);
    const std::span<const std::uint8_t> boundaries(ends);
    const mixed_batch work = mixed.prepare(items, {}, boundaries);
    REQUIRE(work.rows() == total);
    for (index_t layer = 0; layer < shape.layers; ++layer)
      mixed.process(layer, work, rows.q(layer), rows.k(layer), rows.v(layer), rows.out(layer), rows.lse(layer));
    for (std::size_t i = 0; i < items.size(); ++i) {
      const index_t first = work.indptr[i], tokens = items[i].tokens, id = items[i].id;
      batch step;
      if (!items[i].is_prompt)
        step = alone.prepare_step({id}, tokens, boundaries.subspan(std::size_t(first), std::size_t(tokens)));
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        const auto q = part(expected.q(layer), first, tokens), k = part(expected.k(layer), first, tokens),
                   v = part(expected.v(layer), first, tokens);
        const auto out = part(expected.out(layer), first, tokens);
        const auto lse = part(expected.lse(layer), first, tokens);
        if (items[i].is_prompt) {
          alone.prefill(layer, id, q, k, v, boundaries.subspan(std::size_t(first), std::size_t(tokens)));
          alone.prefill_attention(layer, id, q, out, lse);
        } else {
          alone.decode(layer, step, q, k, v, out, lse);
        }
      }
    }
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      REQUIRE(support::same_bits(rows.layers[std::size_t(layer)].out, expected.layers[std::size_t(layer)].out));
      REQUIRE(support::same_bits(rows.layers[std::size_t(layer)].lse, expected.layers[std::size_t(layer)].lse));
    }
    for (const batch_item& item : items) {
      if (!item.is_prompt || random.chance(0.4)) continue;
      mixed.end_prefill(item.id), alone.end_prefill(item.id);
      in_prompt[item.id] = false;
    }
    for (index_t id = 0; id < sequences; ++id) {
      for (index_t head = 0; head < shape.kv_heads; ++head)
        REQUIRE(mixed.positions(1, id, head) == alone.positions(1, id, head));
    }
  }
}

}  // namespace

TEST_CASE("a mixed batch does what its items do alone, bit for bit", "[cache]") {
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    as_alone<full<fp32, dim>>(seed);
    as_alone<snapkv<fp32, dim, dim, stored<dense_rows<fp32, dim>, fixed_pages<16>>>>(seed);
    as_alone<quest<fp32, dim>>(seed);
    as_alone<h2o<fp32, dim>>(seed);
    as_alone<sablock<fp32, dim>>(seed);
    as_alone<sentencekv<fp32, dim>>(seed);
  }
}

TEST_CASE("an item that its sequence cannot take is refused, and no other one has begun", "[cache]") {
  rng random(9);
  snapkv<fp32, dim> recipe;
  recipe.set_budget(64);
  cache<snapkv<fp32, dim>> kv(shape, recipe, std::make_shared<cpu::executor>(1));
  packed_rows_of_layers prompt(random, 100), more(random, 12);
  for (index_t id = 0; id < 2; ++id) {
    kv.open();
    for (index_t layer = 0; layer < shape.layers; ++layer)
      kv.prefill(layer, id, prompt.q(layer), prompt.k(layer), prompt.v(layer));
  }
  kv.end_prefill(0);
  const auto said = [&](const host_vector<batch_item>& items) {
    try {
      kv.prepare(items);
    } catch (const error& refused) {
      return std::string(refused.what());
    }
    return std::string();
  };
  CHECK_THAT(said({}), contains("items of a batch is 0"));
  CHECK_THAT(said({{0, 1}, {1, 1}}), contains("call end_prefill before the first decode step"));
  CHECK_THAT(said({{0, 9}}), contains("tokens of a decode step is 9; expected 1 to 8"));
  CHECK_THAT(said({{0, 0}}), contains("tokens of an item is 0"));
  CHECK_THAT(said({{0, 1}, {0, 3}}), contains("sequence id in a batch is 0; expected given once"));
  CHECK_THAT(said({{1, 3, true}, {7, 1}}), contains("sequence is 7"));
  CHECK(kv.next_position(0) == 100);
  const mixed_batch work = kv.prepare({{1, 9, true}, {0, 3}});
  auto short_rows = more.q(0);
  short_rows.tokens = 11;
  CHECK_THROWS_WITH(kv.process(0, work, short_rows, more.k(0), more.v(0), more.out(0)),
                    contains("rows of a batch is 11"));
  for (index_t layer = 0; layer < shape.layers; ++layer)
    kv.process(layer, work, more.q(layer), more.k(layer), more.v(layer), more.out(layer));
  CHECK_THROWS_WITH(kv.process(1, work, more.q(1), more.k(1), more.v(1), more.out(1)), contains("expected"));
  CHECK(kv.next_position(0) == 103);
  CHECK(kv.next_position(1) == 109);

  // A batch of a chunk alone: once a layer, with results of the right shape, and as it was prepared.
  packed_rows_of_layers chunk(random, 5);
  const mixed_batch alone = kv.prepare({{1, 5, true}});
  auto wrong_out = chunk.out(0);
  wrong_out.heads = 3;
  CHECK_THROWS_WITH(kv.process(0, alone, chunk.q(0), chunk.k(0), chunk.v(0), wrong_out), contains("expected"));
  mixed_batch changed = alone;
  changed.items[0].tokens = 7;
  CHECK_THROWS_WITH(kv.process(0, changed, chunk.q(0), chunk.k(0), chunk.v(0), chunk.out(0)),
                    contains("batch is changed; expected what prepare returned"));
  CHECK(kv.next_position(1) == 109);
  kv.process(0, alone, chunk.q(0), chunk.k(0), chunk.v(0), chunk.out(0));
  CHECK_THROWS_WITH(kv.process(0, alone, chunk.q(0), chunk.k(0), chunk.v(0), chunk.out(0)),
                    contains("tokens of a layer before the batch is 114; expected 109"));
  CHECK(kv.next_position(1) == 114);
  kv.process(1, alone, chunk.q(1), chunk.k(1), chunk.v(1), chunk.out(1));
  kv.end_prefill(1);

  batch step = kv.prepare({{0, 2}, {1, 3}}).step;
  REQUIRE(step.is_packed());
  step.begins[1] = 4;
  CHECK_THROWS_WITH(kv.decode(0, step, chunk.q(0), chunk.k(0), chunk.v(0), chunk.out(0)), contains("step is changed"));
}

TEST_CASE("shares are what they were before a chunk that is taken back") {
  rng random(47);
  packed_rows_of_layers rows(random, 100);
  quest<fp32, dim> recipe;
  recipe.set_budget(64);
  cache<quest<fp32, dim>> held(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = held.open({.budget = {.share = 0.5}});
  const auto chunk = [&](index_t tokens) {
    for (index_t layer = 0; layer < shape.layers; ++layer)
      held.prefill(layer, id, part(rows.q(layer), 0, tokens), part(rows.k(layer), 0, tokens),
                   part(rows.v(layer), 0, tokens));
  };
  const auto comes_back = [&](index_t read) {
    CAPTURE(read);
    CHECK(held.plan(id).read == read);
    chunk(7);
    held.truncate(id, held.next_position(id) - 7);
    CHECK(held.plan(id).read == read);
  };
  chunk(100);
  held.end_prefill(id);
  comes_back(25);  // half of the budget, which is half of 100 tokens
  held.set_budget(80);
  comes_back(25);
  for (index_t made = 0; made < 20; ++made) {
    const batch step = held.prepare_step({id}, 1);
    for (index_t layer = 0; layer < shape.layers; ++layer)
      held.decode(layer, step, part(rows.q(layer), 0, 1), part(rows.k(layer), 0, 1), part(rows.v(layer), 0, 1),
                  part(rows.out(layer), 0, 1));
  }
  comes_back(30);
}
