// A cache whose heads share ragged pages: the bits of runs, pages that are known before the prompt, and a pool that is full.
#include "catch.hpp"

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include <tessera/backend/cpu/store/virtual_blocks.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/methods/streaming_llm.hpp>
#include <tessera/methods/tangram.hpp>

#include "ragged_talk.hpp"

using namespace tessera;
using namespace ragged_talk;

TEST_CASE("attention over ragged pages has the bits of attention over runs, and pages are as many as were foreseen") {
  rng random(1250);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t heads = random.pick({1, 2, 3, 4}), kv_heads = heads * random.between(1, 2);
    const model_shape shape{random.between(1, 3), kv_heads * random.pick({1, 2}), kv_heads};
    const auto shares = random_shares(random, shape.layers * kv_heads);
    const index_t window = random.pick({1, 4, 8}), chunk = random.pick({8, 24, 1'000});
    auto paged = recipe_of<over_pages>(shares, shape, window, chunk);
    paged.placement.heads = heads;
    paged.placement.page = random.pick({1, 4, 16});
    paged.placement.cluster = random.pick({clustering::layer, clustering::model, clustering::none, clustering::fitted});
    paged.dense_layers = random.chance(0.2) ? 1 : 0;
    auto plain = recipe_of<over_runs>(shares, shape, window, chunk);
    plain.dense_layers = paged.dense_layers;
    CAPTURE(i, heads, kv_heads, shape.layers, window, chunk, paged.placement.page, paged.dense_layers);
    const text of(random, shape, 300);
    cache<over_pages> kv(shape, paged, one_thread());
    cache<over_runs> other(shape, plain, one_thread());
    for (index_t sequence = 0; sequence < 2; ++sequence) {
      const index_t id = kv.open();
      REQUIRE(other.open() == id);
      index_t next = 0;
      for (index_t turn = random.between(1, 3); turn > 0; --turn) {
        const index_t prompt = random.between(1, 80);
        const page_plan plan = kv.plan_pages(id, prompt);
        if (next == 0) REQUIRE(kv.upper_bound_pages(prompt) == plan.peak);
        if (random.chance(0.5)) kv.announce(id, prompt);
        index_t most = total(kv.pages(id));
        for (index_t done = 0; done < prompt; done += chunk) {
          const index_t count = std::min(chunk, prompt - done);
          for (index_t layer = 0; layer < shape.layers; ++layer) {
            of.prefill(kv, layer, id, next + done, count);
            most = std::max(most, total(kv.pages(id)));
          }
          of.prefill(other, id, next + done, count);
        }
        REQUIRE(most == plan.peak);
        next += prompt;
        kv.end_prefill(id);
        other.end_prefill(id);
        REQUIRE(kv.pages(id) == plan.final_pages);
        for (index_t count : {1, 3}) {
          for (index_t layer = 0; layer < shape.layers; ++layer) {
            for (index_t h = 0; h < kv_heads; ++h) REQUIRE(kv.positions(layer, id, h) == other.positions(layer, id, h));
          }
          REQUIRE(of.step(kv, id, next, count) == of.step(other, id, next, count));
          REQUIRE(kv.bytes_read(id) == other.bytes_read(id));
          next += count;
        }
      }
    }
  }
}

TEST_CASE("no block stands in two tables, and every (sequence, kv_head) reads as a sequence of one head") {
  rng random(1251);
  const model_shape shape{2, 4, 4};
  const auto shares = random_shares(random, 8);
  auto recipe = recipe_of<over_pages>(shares, shape, 4, 32);
  recipe.placement.cluster = clustering::model;
  const text of(random, shape, 200);
  cache<over_pages> kv(shape, recipe, one_thread());
  std::set<index_t> blocks;
  for (index_t sequence = 0; sequence < 3; ++sequence) {
    const index_t id = kv.open();
    for (index_t first = 0; first < 96; first += 32) of.prefill(kv, id, first, 32);
    kv.end_prefill(id);
    of.step(kv, id, 96, 3);
  }
  for (index_t id = 0; id < 3; ++id) {
    for (index_t layer = 0; layer < 2; ++layer) {
      const auto view = kv.view(layer, id);
      constexpr index_t most = 8;
      std::vector<index_t> table(std::size_t(4 * most));
      cpu::virtual_blocks(view, most, table.data());
      const auto alone = one_head_view(view, table.data(), most);
      for (index_t h = 0; h < 4; ++h) {
        for (index_t b = 0; b < ceil_div(view.length(0, h), view.table.page); ++b) {
          REQUIRE(table[std::size_t(h * most + b)] == view.table.pages(0, h)[b]);
          REQUIRE(blocks.insert(view.table.pages(0, h)[b]).second);
        }
        for (index_t slot = 0; slot < view.length(0, h); ++slot) REQUIRE(alone.key(h, 0, slot) == view.key(0, h, slot));
      }
    }
  }
}

TEST_CASE("a pool that is too small refuses a prompt or a step before anything has changed") {
  rng random(1252);
  const model_shape shape{2, 4, 4};
  const std::vector<double> shares(8, 0.25);
  auto recipe = recipe_of<over_pages>(shares, shape, 4, 32);
  const text of(random, shape, 400);
  const index_t prompt = 96;
  {
    cache<over_pages> unbounded(shape, recipe, one_thread());
    recipe.placement.max_pages = 2 * unbounded.upper_bound_pages(prompt) - 1;
  }
  cache<over_pages> kv(shape, recipe, one_thread());
  const index_t first = kv.open(), second = kv.open();
  kv.announce(first, prompt);
  CHECK_THROWS_WITH(kv.announce(second, prompt), contains("pages of the pool is") && contains("shorten the prompt"));
  CHECK_THROWS_WITH(kv.upper_bound_pages(-1), contains("tokens of the prompt is -1; expected 1 to"));
  CHECK(kv.bytes(second) == 0);
  for (index_t done = 0; done < prompt; done += 32) of.prefill(kv, first, done, 32);  // what was set aside is there
  kv.end_prefill(first);
  kv.announce(second, prompt);  // the first one needs less now
  for (index_t done = 0; done < prompt; done += 32) of.prefill(kv, second, done, 32);
  kv.end_prefill(second);
  // Steps until the pool is full: the last one is refused, in all layers or none.
  index_t next = prompt;
  std::string refused;
  while (refused.empty() && next < 390) {
    const auto before = kv.pages(second);
    try {
      of.step(kv, second, next, 1);
      ++next;
    } catch (const error& problem) {
      refused = problem.what();
      CHECK(kv.pages(second) == before);
    }
  }
  CHECK_THAT(refused, contains("pages of the pool is"));
  CHECK(kv.next_position(second) == next);
  kv.close(first);
  CHECK_NOTHROW(of.step(kv, second, next, 1));  // on as before
}

TEST_CASE("a step of a fork has the pages of what it drops in every layer, or is refused before the first") {
  rng random(1254);
  using method = streaming_llm<fp32, dim, dim, stored<dense_rows<fp32, dim>, ragged_pages>>;
  for (index_t pages = 10; pages <= 40; ++pages) {
    CAPTURE(pages);
    for (const bool slides : {false, true}) {
      model_shape shape{2, 4, 4};
      if (slides) shape.window = 16, shape.sliding = {true, false};
      const text of(random, shape, 200);
      method recipe;
      recipe.set_budget(64);
      recipe.placement.max_pages = pages;
      cache<method> kv(shape, recipe, one_thread());
      const index_t id = kv.open();
      try {
        of.prefill(kv, id, 0, 64);
        kv.end_prefill(id);
      } catch (const error&) {
        continue;  // a pool without room for the prompt
      }
      const index_t fork = kv.fork(id);
      CHECK(kv.available().pages >= 0);
      for (index_t next = 64; next < 120; ++next) {
        const auto before = kv.pages(fork);
        try {
          kv.prepare_step({fork}, 1);
        } catch (const error&) {
          CHECK(kv.pages(fork) == before);
          break;
        }
        of.step(kv, fork, next, 1);  // prepares it again
      }
      kv.close(id);
      const index_t next = kv.next_position(fork);
      CHECK_NOTHROW(of.step(kv, fork, next, 1));
    }
  }
}

TEST_CASE("a pool of as many pages as the bound says takes the whole turn, and a page less does not cover it") {
  rng random(1253);
  const model_shape shape{3, 4, 4};
  const std::vector<double> shares{0.1, 0.9, 0.3, 0.3, 0.5, 0.2, 1.0, 0.4, 0.25, 0.25, 0.7, 0.05};
  auto recipe = recipe_of<over_pages>(shares, shape, 4, 32);
  recipe.placement.heads = random.pick({1, 2});
  const text of(random, shape, 260);
  const index_t prompt = 200, answer = 60;
  capacity bound;
  {
    cache<over_pages> unbounded(shape, recipe, one_thread());
    bound = unbounded.bound(prompt, answer, 32);
    CHECK(unbounded.available() == capacity{capacity::unlimited, capacity::unlimited});
    CHECK(bound.pages >= unbounded.upper_bound_pages(prompt));
    CHECK(bound.pages < unbounded.bound(prompt, answer).pages);  // one chunk is stored whole before it is judged
  }
  recipe.placement.max_pages = index_t(bound.pages);
  cache<over_pages> kv(shape, recipe, one_thread());
  for (int again = 0; again < 2; ++again) {
    CHECK(kv.available().covers(bound));
    CHECK(!kv.available().covers({bound.bytes, bound.pages + 1}));
    const index_t id = kv.open();
    kv.announce(id, prompt);
    CHECK(kv.available().pages < bound.pages);
    for (index_t done = 0; done < prompt; done += 32) of.prefill(kv, id, done, (std::min)(32, prompt - done));
    kv.end_prefill(id);
    for (index_t i = 0; i < answer; ++i) of.step(kv, id, prompt + i, 1);
    kv.close(id);
  }
}
