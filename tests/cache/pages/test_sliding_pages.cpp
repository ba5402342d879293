// Sliding layers in ragged pages: what they are promised, which heads they share pages with, and a pool that both kinds of layers use.
#include "catch.hpp"

#include <algorithm>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/tangram.hpp>

#include "ragged_talk.hpp"

using namespace tessera;
using namespace ragged_talk;

TEST_CASE("layers that slide are promised pages for their windows, and a prompt needs no more") {
  rng random(1253);
  for (index_t i = 0; i < support::scaled(20); ++i) {
    model_shape shape{6, 2, 2, random.pick({1, 16, 40})};
    for (index_t layer = 0; layer < 6; ++layer) shape.sliding.push_back(layer % 6 != 5);
    const std::vector<double> shares(12, 0.25);
    auto recipe = recipe_of<over_pages>(shares, shape, 4, random.pick({8, 32}));
    recipe.placement.heads = 2;
    recipe.placement.page = 4;
    recipe.placement.cluster =
        random.pick({clustering::layer, clustering::none, clustering::model, clustering::fitted});
    const index_t prompt = random.between(500, 700), chunk = recipe.schedule.chunk;
    recipe.placement.max_pages = cache<over_pages>(shape, recipe, one_thread()).upper_bound_pages(prompt);
    CAPTURE(i, shape.window, prompt, chunk, recipe.placement.max_pages);
    // A layer that slides holds its window, what it may have left behind, and two chunks; the other one a quarter and a chunk.
    const index_t sliding = shape.window + std::max(16, shape.window / 64) + 2 * chunk;
    CHECK(recipe.placement.max_pages <= 5 * ceil_div(sliding, 4) + ceil_div(prompt / 4 + chunk + 5, 4));
    const text of(random, shape, 700);
    cache<over_pages> kv(shape, recipe, one_thread());
    for (index_t tries = 0; tries < 20; ++tries) {  // chunks in parts of all lengths
      const index_t id = kv.open(), pieces = random.pick({1, 2, 3, 8});
      const page_plan plan = kv.plan_pages(id, prompt);
      kv.announce(id, prompt);
      for (index_t done = 0, more = 0; done < prompt; done += more) {
        const index_t end = std::min(prompt, (done / chunk + 1) * chunk);
        more = std::min(pieces == 8 ? random.between(1, chunk) : ceil_div(chunk, pieces), end - done);
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          of.prefill(kv, layer, id, done, more);
          REQUIRE(total(kv.pages(id)) <= plan.peak);
        }
      }
      kv.end_prefill(id);
      for (std::size_t group = 0; group < plan.final_pages.size(); ++group)
        REQUIRE(kv.pages(id)[group] <= plan.final_pages[group]);
      kv.close(id);
    }
  }
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
    recipe.placement.cluster =
        random.pick({clustering::layer, clustering::none, clustering::model, clustering::fitted});
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
