// LoopServe in a cache: what every step reads against a choice in double, lines of prompts, turns, batches, bytes.
#include "catch.hpp"

#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/loopserve_prefill.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/observation_window.hpp>

#include "methods/support/loopserve_reader.hpp"
#include "methods/talk.hpp"

using namespace methods_test;
using tessera::nhd_rows;

namespace {

using method = tessera::loopserve<tessera::fp32, dim>;

}  // namespace

TEST_CASE("loopserve's steps read what the newest queries chose, in double, at every refresh of every turn") {
  support::rng random(331);
  index_t refreshes = 0;
  for (index_t i = 0; i < support::scaled(60); ++i) {
    const tessera::model_shape shape{random.between(1, 2), random.pick({2, 4, 6}), 2};
    const model_data data(random, shape, 300);
    method recipe;
    recipe.retain.scorer.window = random.pick({1, 5, 16, 96});
    recipe.set_budget(random.between(0, 44) + std::max(16, recipe.retain.scorer.window));
    recipe.schedule.first = random.pick({0, 1, 5, 16, 20, 50});
    recipe.schedule.every = random.pick({1, 3, 16, 20});
    const bool by_query_head = random.chance(0.5), with_columns = random.chance(0.5),
               with_slashes = with_columns && random.chance(0.5);
    if (by_query_head) recipe.retain.scope.per = tessera::reading_head::q_head;
    if (with_columns) recipe.prefill.lines = with_slashes ? tessera::read_lines::both : tessera::read_lines::vertical;
    recipe.prefill.alpha = 0.5f;
    CAPTURE(i, recipe.budget(), recipe.retain.scorer.window, recipe.schedule.first, recipe.schedule.every,
            by_query_head, with_columns, with_slashes);
    talk<method> now(recipe, data);
    std::vector<reader> readers;
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      readers.push_back({data, recipe.budget(), recipe.retain.scorer.window, recipe.schedule.first,
                         recipe.schedule.every, by_query_head});
      if (with_columns) readers.back().columns.resize(std::size_t(readers.back().count()));
      if (with_slashes) readers.back().slashes.resize(std::size_t(readers.back().count()));
    }
    for (const index_t prompt : {index_t(90), index_t(1), random.between(2, 40)}) {
      for (index_t left = prompt; left > 0;) {
        const index_t tokens = random.between(1, left);
        now.chunk(tokens);
        left -= tokens;
        for (index_t head = 0; head < 2; ++head)  // an earlier turn's lists have ended
          REQUIRE(now.cache.readable(0, now.id, head) == now.cache.positions(0, now.id, head));
        for (index_t layer = 0; with_columns && layer < shape.layers; ++layer) {
          for (index_t h = 0; h < shape.q_heads; ++h) {
            const tessera::line_set& fresh = now.cache.lines(layer, now.id).heads[std::size_t(h)];
            reader& to = readers[std::size_t(layer)];
            const auto list = std::size_t(by_query_head ? h : h / data.group());
            to.columns[list].insert(fresh.vertical.begin(), fresh.vertical.end());
            if (with_slashes) to.slashes[list].insert(fresh.slash.begin(), fresh.slash.end());
          }
        }
      }
      now.cache.end_prefill(now.id);
      for (index_t layer = 0; layer < shape.layers; ++layer) readers[std::size_t(layer)].begin_turn(layer, now.next);
      for (index_t done = 0; done < 40;) {
        const index_t tokens = random.chance(0.7) ? 1 : random.between(2, 8), first = now.next;
        const auto out = now.step(tokens);
        done += tokens;
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          CAPTURE(layer, first, tokens);
          reader& expected = readers[std::size_t(layer)];
          const auto& attended = now.cache.attended(layer, now.id);
          REQUIRE(index_t(attended.size()) == expected.count());
          for (index_t list = 0; list < expected.count(); ++list) {
            REQUIRE(attended[std::size_t(list)] == expected.read(list, first, now.next));
          }
          for (index_t t = 0; t < tokens; ++t) {
            for (index_t h = 0; h < shape.q_heads; ++h) {
              const auto& read = attended[std::size_t(by_query_head ? h : h / data.group())];
              const auto wanted = data.attend({}, layer, first + t, h, read);
              const float* row = out.data() + ((offset_t(layer) * tokens + t) * shape.q_heads + h) * dim;
              REQUIRE(support::row_error(row, wanted.out) < 1e-5);
            }
          }
          refreshes += expected.decoded(layer, tokens, now.next);
        }
      }
      for (index_t head = 0; head < 2; ++head) {
        REQUIRE(index_t(now.cache.positions(0, now.id, head).size()) == now.next);  // nothing is dropped
      }
    }
  }
  CHECK(refreshes > support::scaled(100));
}

TEST_CASE("a prompt's rows attend its chunk's lines, chosen anew in every chunk and turn") {
  support::rng random(332);
  for (index_t i = 0; i < support::scaled(20); ++i) {
    const tessera::model_shape shape{2, 4, 2};
    const model_data data(random, shape, 260);
    tessera::loopserve_prefill<tessera::fp32, dim> recipe;
    recipe.prefill.alpha = random.pick({0.4f, 0.9f, 1.0f});
    recipe.prefill.sampled_rows = random.pick({3, 48});
    recipe.prefill.dense_rows = random.pick({0, 1, 16, 300});
    recipe.dense_layers = random.chance(0.3) ? 1 : 0;
    talk now(recipe, data);
    for (const index_t turn : {130, 1, 70}) {
      for (index_t left = turn; left > 0;) {
        const index_t tokens = random.chance(0.3) ? left : random.between(1, left), first = now.next;
        left -= tokens;
        const auto results = now.chunk(tokens);
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          const auto& lines = now.cache.lines(layer, now.id);
          const bool dense = layer < recipe.dense_layers;
          REQUIRE(lines.heads.size() == (dense ? 0u : 4u));
          if (!dense) {
            REQUIRE((lines.first == first && lines.next == now.next));
            REQUIRE(lines.dense_from == now.next - std::min(recipe.prefill.dense_rows, tokens));
            REQUIRE(index_t(lines.rows.size()) == std::min(recipe.prefill.sampled_rows, tokens));
            REQUIRE(lines.rows == now.cache.lines(shape.layers - 1, now.id).rows);  // the same in every layer
          }
          for (index_t t = 0; t < tokens; ++t) {
            for (index_t h = 0; h < 4; ++h) {
              std::vector<index_t> read;
              for (index_t at = 0; at <= first + t; ++at) {
                const auto holds = [](const std::vector<index_t>& list, index_t x) {
                  return std::binary_search(list.begin(), list.end(), x);
                };
                if (dense || recipe.prefill.alpha == 1 || t >= tokens - recipe.prefill.dense_rows ||
                    holds(lines.heads[std::size_t(h)].vertical, at) ||
                    holds(lines.heads[std::size_t(h)].slash, first + t - at))
                  read.push_back(at);
              }
              const auto wanted = data.attend({}, layer, first + t, h, read);
              const std::size_t row = std::size_t(t * 4 + h);
              REQUIRE(support::row_error(results[std::size_t(layer)].out.data() + row * dim, wanted.out) < 1e-5);
              REQUIRE(support::number_error(results[std::size_t(layer)].lse[row], wanted.lse) < 1e-5);
            }
          }
        }
      }
      now.cache.end_prefill(now.id);
      now.step(1);
    }
  }
}

TEST_CASE("conversations that choose again in one batch each get their own choice") {
  support::rng random(333);
  const tessera::model_shape shape{2, 4, 2};
  std::vector<model_data> data;
  for (int b = 0; b < 3; ++b) data.emplace_back(random, shape, 120);
  method recipe;
  recipe.set_budget(20);
  recipe.schedule.first = recipe.schedule.every = 4;
  std::vector<talk<method>> alone;
  for (int b = 0; b < 3; ++b) alone.emplace_back(recipe, data[std::size_t(b)]);
  tessera::cache<method> together(shape, recipe, std::make_shared<tessera::cpu::executor>(1));
  together.trace_attended(true);
  std::vector<index_t> ids;
  for (int b = 0; b < 3; ++b) {
    ids.push_back(together.open());
    for (index_t layer = 0; layer < 2; ++layer) {
      together.prefill(layer, ids.back(), data[std::size_t(b)].queries(layer, 0, 80 + b),
                       data[std::size_t(b)].keys(layer, 0, 80 + b), data[std::size_t(b)].values(layer, 0, 80 + b));
    }
    together.end_prefill(ids.back());
    alone[std::size_t(b)].prompt(80 + b);
  }
  index_t chosen = 0;
  for (index_t step = 0; step < 10; ++step) {
    const tessera::batch now = together.prepare_step(ids, 1);
    chosen += now.evicts_last;
    for (index_t layer = 0; layer < 2; ++layer) {
      std::vector<float> q, k, v, out(3 * 4 * dim);
      for (int b = 0; b < 3; ++b) {
        const model_data& own = data[std::size_t(b)];
        q.insert(q.end(), own.query(layer, 80 + b + step, 0), own.query(layer, 80 + b + step, 0) + 4 * dim);
        k.insert(k.end(), own.key(layer, 80 + b + step, 0), own.key(layer, 80 + b + step, 0) + 2 * dim);
        v.insert(v.end(), own.value(layer, 80 + b + step, 0), own.value(layer, 80 + b + step, 0) + 2 * dim);
      }
      together.decode(layer, now, nhd_rows<const float>(q.data(), 1, 4, dim, 3),
                      nhd_rows<const float>(k.data(), 1, 2, dim, 3), nhd_rows<const float>(v.data(), 1, 2, dim, 3),
                      nhd_rows(out.data(), 1, 4, dim, 3));
    }
    for (std::size_t b = 0; b < 3; ++b) {
      alone[b].step(1);
      for (index_t layer = 0; layer < 2; ++layer) {
        REQUIRE(together.attended(layer, ids[b]) == alone[b].cache.attended(layer, alone[b].id));
      }
      REQUIRE(together.bytes_read(ids[b]) == alone[b].cache.bytes_read(alone[b].id));
    }
  }
  CHECK(chosen == 2);
}

TEST_CASE("drafted tokens count as outputs once they are accepted") {
  support::rng random(338);
  const tessera::model_shape shape{2, 4, 2};
  const model_data data(random, shape, 160);
  for (const bool with_slashes : {false, true}) {
    method recipe;
    recipe.set_budget(24);
    recipe.schedule.first = 6;
    recipe.schedule.every = 5;
    if (with_slashes) recipe.prefill.lines = tessera::read_lines::both;
    recipe.prefill.alpha = 0.4f;
    talk<method> one_by_one(recipe, data), drafted(recipe, data);
    one_by_one.prompt(100);
    drafted.prompt(100);
    index_t outputs = 0, choices = 0;
    // Accepted of a draft of 6 tokens; they come to 6, 11 and 16 outputs, and what is not accepted counts for nothing.
    for (const index_t accepted : {4, 2, 1, 4, 3, 2, 3}) {
      const auto drafts = drafted.cache.prepare_draft({drafted.id}, 6);
      std::vector<std::vector<float>> of_draft;
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        of_draft.emplace_back(std::size_t(6 * shape.q_heads * dim));
        drafted.cache.decode(layer, drafts, data.queries(layer, drafted.next, 6), data.keys(layer, drafted.next, 6),
                             data.values(layer, drafted.next, 6),
                             nhd_rows(of_draft.back().data(), 6, shape.q_heads, dim));
      }
      drafted.cache.accept(drafted.id, accepted);
      drafted.next += accepted;
      bool chose = false;
      for (index_t t = 0; t < accepted; ++t) {
        const auto out = one_by_one.step(1);
        ++outputs;
        chose = outputs >= 6 && (outputs - 6) % 5 == 0;
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          const std::size_t row = std::size_t(shape.q_heads * dim);
          for (std::size_t i = 0; i < row; ++i)
            REQUIRE(of_draft[std::size_t(layer)][std::size_t(t) * row + i] ==
                    Approx(out[std::size_t(layer) * row + i]).margin(1e-5));
        }
      }
      choices += chose;
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        for (index_t head = 0; head < shape.kv_heads; ++head) {
          CAPTURE(outputs, layer, head);
          REQUIRE(drafted.cache.readable(layer, drafted.id, head) ==
                  one_by_one.cache.readable(layer, one_by_one.id, head));
        }
      }
    }
    CHECK(choices == 3);
  }
}

TEST_CASE("sequences whose choices fall into different steps are refused as one batch") {
  support::rng random(334);
  const model_data data(random, {1, 2, 1}, 100);
  method recipe;
  recipe.set_budget(20);
  recipe.schedule.first = recipe.schedule.every = 2;
  talk<method> now(recipe, data);
  now.prompt(40);
  now.step(1);
  const index_t other = now.cache.open();
  now.cache.prefill(0, other, data.queries(0, 0, 30), data.keys(0, 0, 30), data.values(0, 0, 30));
  now.cache.end_prefill(other);
  CHECK_THROWS_WITH(now.cache.prepare_step({now.id, other}, 1), contains("step the sequences in batches"));
}

TEST_CASE("a step that chooses again has read every key, any other its lists") {
  support::rng random(335);
  const model_data data(random, {1, 4, 2}, 200);
  for (const bool by_query_head : {false, true}) {
    method recipe;
    recipe.set_budget(20);
    recipe.schedule.first = recipe.schedule.every = 2;
    if (by_query_head) recipe.retain.scope.per = tessera::reading_head::q_head;
    talk<method> now(recipe, data);
    now.prompt(150);
    for (index_t step = 1; step <= 6; ++step) {
      now.step(1);
      offset_t tokens = 0, listed = 0;
      for (index_t head = 0; head < 2; ++head) {
        std::set<index_t> read;
        const auto& attended = now.cache.attended(0, now.id);
        for (std::size_t list = 0; list < attended.size(); ++list) {
          if (index_t(list) / (by_query_head ? 2 : 1) != head) continue;
          read.insert(attended[list].begin(), attended[list].end());
          listed += offset_t(attended[list].size());
        }
        tokens += offset_t(read.size());
      }
      const offset_t keys = step % 2 == 0 ? 2 * (150 + step) - tokens : 0;
      CHECK(now.cache.bytes_read(now.id) == tokens * 512 + keys * 256 + listed * 4);
    }
  }
}

TEST_CASE("lines before a first stage that drops: a later turn's rows see what is left, by position") {
  support::rng random(336);
  using recipe_type =
      tessera::recipe<tessera::retain<tessera::observation_window, tessera::uniform, tessera::top_tokens>,
                      tessera::dense<tessera::fp32, dim>, tessera::retrieve_all, tessera::dense_decode, tessera::once,
                      tessera::covering_lines>;
  for (index_t i = 0; i < support::scaled(20); ++i) {
    const model_data data(random, {1, 4, 2}, 300);
    recipe_type recipe;
    recipe.set_budget(60);
    recipe.retain.scorer.window = 8;
    recipe.prefill.alpha = 0.6f;
    recipe.prefill.dense_rows = random.pick({0, 16});
    talk now(recipe, data);
    now.prompt(150);
    now.step(3);
    const index_t first = now.next, tokens = random.between(1, 120);
    const auto results = now.chunk(tokens);
    const auto& lines = now.cache.lines(0, now.id);
    bool sparse = false;
    for (index_t t = 0; t < tokens; ++t) {
      for (index_t h = 0; h < 4; ++h) {
        std::vector<index_t> read;
        const auto& [vertical, slash] = lines.heads[std::size_t(h)];
        for (const index_t at : now.cache.positions(0, now.id, h / 2)) {
          if (at > first + t) continue;
          const bool on = first + t >= lines.dense_from || std::binary_search(vertical.begin(), vertical.end(), at) ||
                          std::binary_search(slash.begin(), slash.end(), first + t - at);
          if (on) read.push_back(at);
          sparse |= !on;
        }
        const auto wanted = data.attend({}, 0, first + t, h, read);
        REQUIRE(support::row_error(results[0].out.data() + (t * 4 + h) * dim, wanted.out) < 1e-5);
      }
    }
    if (tokens > 100) CHECK(sparse);
    now.cache.end_prefill(now.id);
    CHECK(now.cache.positions(0, now.id, 0).size() == 60);
  }
}

TEST_CASE("loopserve refuses a budget below what it observes, and numbers that make no sense") {
  support::rng random(337);
  const auto refusal = [](auto change) {
    method recipe;
    change(recipe);
    try {
      recipe.check();
    } catch (const tessera::error& refused) {
      return std::string(refused.what());
    }
    return std::string("nothing was thrown");
  };
  CHECK(refusal([](method&) {}) == "nothing was thrown");
  CHECK_THAT(refusal([](method& m) { m.set_budget(15); }), contains("observed is 16; expected at most the budget"));
  CHECK_THAT(refusal([](method& m) { m.schedule.every = 0; }), contains("every is 0; expected 1"));
  CHECK_THAT(refusal([](method& m) { m.schedule.first = -1; }), contains("first is -1; expected 0"));
  CHECK_THAT(refusal([](method& m) { m.prefill.sampled_rows = 0; }), contains("sampled_rows is 0; expected 1"));
  CHECK_THAT(refusal([](method& m) { m.prefill.alpha = 1.5f; }), contains("alpha is 1.5; expected "));
}
