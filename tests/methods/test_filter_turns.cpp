// A filter's lists are those of one turn: where its schedule lets a prompt's end pass, the turn's steps may read everything.
#include "catch.hpp"

#include <tessera/attention/dense_decode.hpp>
#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/scorer/observation_window.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "methods/talk.hpp"
#include "support/open_policies.hpp"

using namespace methods_test;

namespace {

template <class Retrieve, class Attention>
using every_other = tessera::recipe<tessera::filter<tessera::observation_window, tessera::uniform, tessera::top_tokens>,
                                    tessera::dense<tessera::fp32, dim>, Retrieve, Attention, support::every_other_turn>;
using alone = every_other<tessera::retrieve_all, tessera::dense_decode>;
using over_pages = every_other<tessera::retrieve<tessera::page_min_max, tessera::top_pages>, tessera::gathered_decode>;
using pages = tessera::quest<tessera::fp32, dim>;

constexpr index_t budget = 24;
const tessera::model_shape shape{2, 4, 2};
struct turn_of {
  index_t prompt;
  bool chooses;
};
constexpr turn_of turns[] = {{60, true}, {33, false}, {1, true}, {20, false}};
constexpr index_t steps[] = {1, 5, 1, 1}, decoded = 8, tokens = 60 + 33 + 1 + 20 + 4 * decoded;

/// Takes the turns, says what steps may read and what they come to, and calls `look()` behind every step.
template <class Recipe, class Look>
void take_turns(talk<Recipe>& now, const Look& look) {
  for (const turn_of& turn : turns) {
    CAPTURE(turn.prompt, turn.chooses);
    for (const index_t chunk : {turn.prompt / 3, turn.prompt - turn.prompt / 3}) {
      if (chunk == 0) continue;
      now.chunk(chunk);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        for (index_t head = 0; head < shape.kv_heads; ++head)
          REQUIRE(now.cache.readable(layer, now.id, head) == now.cache.positions(layer, now.id, head));
      }
    }
    now.cache.end_prefill(now.id);
    index_t outputs = 0;
    for (const index_t count : steps) {
      const index_t first = now.next;
      const std::vector<float> out = now.step(count);
      outputs += count;
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        for (index_t head = 0; head < shape.kv_heads; ++head) {
          const auto readable = now.cache.readable(layer, now.id, head);
          REQUIRE(now.cache.positions(layer, now.id, head).size() == std::size_t(now.next));  // nothing is dropped
          REQUIRE(index_t(readable.size()) == (turn.chooses ? budget + outputs : now.next));
          for (index_t t = 0; t < outputs; ++t) REQUIRE(readable.rbegin()[t] == now.next - 1 - t);
        }
      }
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        for (index_t t = 0; t < count; ++t) {
          for (index_t h = 0; h < shape.q_heads; ++h) {
            const auto& attended = now.cache.attended(layer, now.id)[std::size_t(h / 2)];
            const auto wanted = now.data.attend({}, layer, first + t, h, attended);
            const float* row = out.data() + ((offset_t(layer) * count + t) * shape.q_heads + h) * dim;
            REQUIRE(support::row_error(row, wanted.out) < 1e-5);
          }
        }
      }
      look();
    }
  }
}

}  // namespace

TEST_CASE("where a schedule lets a prompt's end pass, a filter lets everything through, whatever it chose before") {
  support::rng random(341);
  const model_data data(random, shape, tokens);
  alone recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.window = 4;
  talk<alone> now(recipe, data);
  take_turns(now, [&] {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      for (index_t head = 0; head < shape.kv_heads; ++head)
        REQUIRE(now.cache.attended(layer, now.id)[std::size_t(head)] == now.cache.readable(layer, now.id, head));
    }
  });
}

TEST_CASE("an index behind a filter that lets everything through finds what one over everything finds") {
  support::rng random(342);
  const model_data data(random, shape, tokens);
  over_pages recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.window = 4;
  recipe.retrieve.tokens = 32;
  recipe.retrieve.scorer.page = 4;
  pages unfiltered;
  unfiltered.set_budget(32);
  unfiltered.retrieve.scorer.page = 4;
  talk<over_pages> now(recipe, data);
  talk<pages> twin(unfiltered, data);
  std::vector<std::vector<std::vector<index_t>>> found;
  take_turns(now, [&] {
    for (index_t layer = 0; layer < shape.layers; ++layer) found.push_back(now.cache.attended(layer, now.id));
  });
  bool differs = false;
  std::size_t at = 0;
  for (const turn_of& turn : turns) {
    twin.prompt(turn.prompt);
    for (const index_t count : steps) {
      twin.step(count);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        const bool same = found[at++] == twin.cache.attended(layer, twin.id);
        if (!turn.chooses) REQUIRE(same);
        differs |= !same;
      }
    }
  }
  CHECK(differs);  // behind lists it finds something else
}
