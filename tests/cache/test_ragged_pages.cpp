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

#include "support/random.hpp"

using namespace tessera;
using support::rng;

namespace {

constexpr int dim = 64;
using over_runs = tangram<fp32, dim, dim, dense<fp32, dim>>;
using over_pages = tangram<fp32, dim, dim, stored<dense_rows<fp32, dim>, ragged_pages>>;

struct text {
  model_shape shape;
  index_t tokens;
  std::vector<float> q, k;  // [layers, tokens, heads, dim]

  text(rng& random, const model_shape& of, index_t count) : shape(of), tokens(count) {
    q = support::normals(random, std::size_t(of.layers * count * of.q_heads * dim), 1.5f);
    k = support::normals(random, std::size_t(of.layers * count * of.kv_heads * dim));
  }
  rows_view<const float> queries(index_t layer, index_t first, index_t count) const {
    return nhd_rows(q.data() + offset_t(layer * tokens + first) * shape.q_heads * dim, count, shape.q_heads, dim);
  }
  rows_view<const float> keys(index_t layer, index_t first, index_t count) const {
    return nhd_rows(k.data() + offset_t(layer * tokens + first) * shape.kv_heads * dim, count, shape.kv_heads, dim);
  }
  template <class Cache>
  void prefill(Cache& kv, index_t layer, index_t id, index_t first, index_t count) const {
    kv.prefill(layer, id, queries(layer, first, count), keys(layer, first, count), keys(layer, first, count));
  }
  template <class Cache>
  void prefill(Cache& kv, index_t id, index_t first, index_t count) const {
    for (index_t layer = 0; layer < shape.layers; ++layer) prefill(kv, layer, id, first, count);
  }
  template <class Cache>
  std::vector<float> step(Cache& kv, index_t id, index_t next, index_t count) const {
    const std::size_t rows = std::size_t(shape.layers * shape.q_heads * count);
    std::vector<float> out(rows * (dim + 1));
    const batch now = kv.prepare_step({id}, count);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const offset_t at = offset_t(layer) * shape.q_heads * count;
      kv.decode(layer, now, queries(layer, next, count), keys(layer, next, count), keys(layer, next, count),
                nhd_rows(out.data() + at * dim, count, shape.q_heads, dim),
                nhd_rows(out.data() + rows * dim + at, count, shape.q_heads, 1));
    }
    return out;
  }
};

std::shared_ptr<cpu::executor> one_thread() { return std::make_shared<cpu::executor>(1); }

std::vector<double> random_shares(rng& random, index_t count) {
  std::vector<double> shares;
  for (index_t i = 0; i < count; ++i) shares.push_back(random.chance(0.1) ? 1.0 : 0.02 + 0.5 * random.uniform());
  return shares;
}

template <class Recipe>
Recipe recipe_of(const std::vector<double>& shares, const model_shape& shape, index_t window, index_t chunk) {
  Recipe recipe;
  recipe.retain.scorer.window = window;
  recipe.retain.budget.shares = {shares.data(), shape.layers, shape.kv_heads};
  recipe.schedule.chunk = chunk;
  return recipe;
}

index_t total(const std::vector<index_t>& pages) {
  index_t sum = 0;
  for (const index_t one : pages) sum += one;
  return sum;
}

}  // namespace

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

TEST_CASE("layers that slide are promised pages for their windows: a prompt needs no more, and may need as many") {
  rng random(1253);
  const index_t rounds = support::scaled(20);
  index_t reached = 0;
  for (index_t i = 0; i < rounds; ++i) {
    model_shape shape{6, 2, 2, random.pick({1, 16, 40})};
    for (index_t layer = 0; layer < 6; ++layer) shape.sliding.push_back(layer % 6 != 5);
    const std::vector<double> shares(12, 0.25);
    auto recipe = recipe_of<over_pages>(shares, shape, 4, random.pick({8, 32}));
    recipe.placement.heads = 2;
    recipe.placement.page = 4;
    recipe.placement.cluster = random.pick({clustering::layer, clustering::none, clustering::model, clustering::fitted});
    const index_t prompt = random.between(500, 700), chunk = recipe.schedule.chunk;
    recipe.placement.max_pages = cache<over_pages>(shape, recipe, one_thread()).upper_bound_pages(prompt);
    CAPTURE(i, shape.window, prompt, chunk, recipe.placement.max_pages);
    // A layer that slides holds its window, what it may have left behind, and a chunk; the other one a quarter and a chunk.
    const index_t sliding = shape.window + std::max(16, shape.window / 64) + chunk;
    CHECK(recipe.placement.max_pages <= 5 * ceil_div(sliding, 4) + ceil_div(prompt / 4 + chunk + 5, 4));
    const text of(random, shape, 700);
    cache<over_pages> kv(shape, recipe, one_thread());
    index_t most = 0, planned = 0;
    for (index_t tries = 0; tries < 20; ++tries) {  // chunks in parts of all lengths
      const index_t id = kv.open(), pieces = random.pick({1, 2, 3, 8});
      const page_plan plan = kv.plan_pages(id, prompt);
      planned = plan.peak;
      kv.announce(id, prompt);
      for (index_t done = 0, more = 0; done < prompt; done += more) {
        const index_t end = std::min(prompt, (done / chunk + 1) * chunk);
        more = std::min(pieces == 8 ? random.between(1, chunk) : ceil_div(chunk, pieces), end - done);
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          of.prefill(kv, layer, id, done, more);
          most = std::max(most, total(kv.pages(id)));
          REQUIRE(most <= plan.peak);
        }
      }
      kv.end_prefill(id);
      for (std::size_t group = 0; group < plan.final_pages.size(); ++group)
        REQUIRE(kv.pages(id)[group] <= plan.final_pages[group]);
      kv.close(id);
    }
    reached += most == planned ? 1 : 0;
  }
  CHECK(reached >= rounds / 4);  // few ways of cutting a prompt take all of it
}

TEST_CASE("heads of sliding layers share no pages with heads that keep more, where groups go over the model") {
  model_shape shape{12, 4, 2, 16};
  for (index_t layer = 0; layer < 12; ++layer) shape.sliding.push_back(layer % 6 < 3);
  rng random(1255);
  const auto shares = random_shares(random, 24);
  for (const bool calibrated : {true, false}) {
    auto recipe = recipe_of<over_pages>(shares, shape, 4, 32);
    if (!calibrated) recipe.retain.budget.shares = {};
    recipe.placement.cluster = clustering::model;
    recipe.placement.heads = 12;
    const head_groups groups = placement_of(recipe, shape).groups(shape.layers, shape.kv_heads);
    for (index_t group = 0; group < groups.count(); ++group) {
      index_t sliding = 0;
      for (const index_t head : groups.row(group)) sliding += shape.slides(head / 2) ? 1 : 0;
      CHECK((sliding == 0 || sliding == groups.size(group)));
    }
  }
}

TEST_CASE("sliding and full layers in one pool: no page is lost, none is counted twice, and a reservation holds") {
  const index_t operations = support::scaled(3000);
  rng random(1256);
  for (index_t done = 0, round = 0; done < operations; ++round) {
    model_shape shape{random.between(2, 4), 2, 2, random.pick({1, 8, 24})};
    for (index_t layer = 0; layer < shape.layers; ++layer) shape.sliding.push_back(layer == 0 || random.chance(0.5));
    const auto shares = random_shares(random, shape.layers * 2);
    auto recipe = recipe_of<over_pages>(shares, shape, random.pick({1, 4}), random.pick({8, 24}));
    recipe.placement.heads = random.pick({1, 2});
    recipe.placement.page = random.between(1, 5);
    recipe.placement.cluster = random.pick({clustering::layer, clustering::none, clustering::model, clustering::fitted});
    const index_t chunk = recipe.schedule.chunk, longest = 120;
    recipe.placement.max_pages = 2 * cache<over_pages>(shape, recipe, one_thread()).upper_bound_pages(longest);
    CAPTURE(round, done, shape.layers, shape.window, chunk, recipe.placement.heads, recipe.placement.page);
    const text of(random, shape, 400);
    cache<over_pages> kv(shape, recipe, one_thread());
    struct talk {
      index_t id, prompt, read;
    };
    std::vector<talk> talks;
    for (index_t call = 0; call < 300; ++call, ++done) {
      const std::size_t at = talks.empty() ? 0 : std::size_t(random.between(0, index_t(talks.size()) - 1));
      const bool ended = !talks.empty() && talks[at].read == talks[at].prompt;
      if (talks.empty() || random.chance(0.15)) {
        const index_t prompt = random.between(1, longest), id = kv.open();
        try {
          kv.announce(id, prompt);
          talks.push_back({id, prompt, 0});
        } catch (const error&) {
          REQUIRE(total(kv.pages(id)) == 0);
          kv.close(id);
        }
      } else if (!ended) {  // what was announced is there, whatever others do
        talk& one = talks[at];
        const index_t more = std::min(chunk, one.prompt - one.read);
        REQUIRE_NOTHROW(of.prefill(kv, one.id, one.read, more));
        one.read += more;
        if (one.read == one.prompt) REQUIRE_NOTHROW(kv.end_prefill(one.id));
      } else if (random.chance(0.3) || kv.next_position(talks[at].id) > 300) {
        kv.close(talks[at].id);
        talks.erase(talks.begin() + std::ptrdiff_t(at));
      } else if (random.chance(0.2)) {
        const index_t id = kv.fork(talks[at].id);
        talks.push_back({id, talks[at].prompt, talks[at].prompt});
      } else {
        const auto before = kv.pages(talks[at].id);
        try {
          of.step(kv, talks[at].id, kv.next_position(talks[at].id), random.pick({1, 3}));
        } catch (const error&) {
          REQUIRE(kv.pages(talks[at].id) == before);
        }
      }
      REQUIRE(kv.available().pages >= 0);
    }
    for (const talk& one : talks) kv.close(one.id);
    REQUIRE(kv.available().pages == recipe.placement.max_pages);
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
