// Scores that an engine gives decide what stays, whenever they come.
#include "catch.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include <tessera/cache.hpp>

#include "gated_method.hpp"
#include "support/calls/saved_bytes.hpp"

using namespace tessera;

namespace {

using gated::dim, gated::kv_heads, gated::layers, gated::q_heads, gated::scores_of;
using method = gated::at_the_end<fp32>;
using chunked = gated::by_chunks<fp32>;

template <class Method = method>
struct talk {
  cache<Method> held;
  index_t id = 0;
  std::vector<float> rows = std::vector<float>(std::size_t(1000 * q_heads * dim), 0.25f);

  explicit talk(const Method& recipe) : held({layers, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1)) {
    id = held.open();
  }
  rows_view<const float> given(index_t tokens, index_t heads) const {
    return nhd_rows<const float>(rows.data(), tokens, heads, dim);
  }
  void chunk(index_t layer, index_t tokens) {
    held.prefill(layer, id, given(0, q_heads), given(tokens, kv_heads), given(tokens, kv_heads));
  }
  void chunk(index_t tokens) {
    for (index_t layer = 0; layer < layers; ++layer) chunk(layer, tokens);
  }
  void score(index_t first, index_t tokens) {
    for (index_t layer = 0; layer < layers; ++layer)
      held.set_scores(layer, id, first, tokens, scores_of(layer, first, tokens).data());
  }
  void step() {
    std::vector<float> out(std::size_t(q_heads * dim));
    const batch now = held.prepare_step({id}, 1);
    for (index_t layer = 0; layer < layers; ++layer)
      held.decode(layer, now, given(1, q_heads), given(1, kv_heads), given(1, kv_heads),
                  nhd_rows(out.data(), 1, q_heads, dim));
  }
  std::vector<index_t> kept(index_t layer, index_t head) const { return held.positions(layer, id, head); }
};

/// The positions of `all` that stay: the newest `recent`, and of the others those that score most, earlier ones first.
std::vector<index_t> best(std::vector<index_t> all, index_t layer, index_t head, index_t budget, index_t recent) {
  if (index_t(all.size()) <= budget) return all;
  std::vector<index_t> newest(all.end() - recent, all.end());
  all.erase(all.end() - recent, all.end());
  std::stable_sort(all.begin(), all.end(), [&](index_t a, index_t b) {
    return scores_of(layer, a, 1)[std::size_t(head)] > scores_of(layer, b, 1)[std::size_t(head)];
  });
  all.resize(std::size_t(budget - recent));
  all.insert(all.end(), newest.begin(), newest.end());
  std::sort(all.begin(), all.end());
  return all;
}
std::vector<index_t> counted(index_t end) {
  std::vector<index_t> all(static_cast<std::size_t>(end));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

template <class Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const error& refused) {
    return refused.what();
  }
  return "nothing was thrown";
}

method of_budget(index_t budget, index_t recent) {
  method recipe;
  recipe.set_budget(budget);
  recipe.retain.scorer.recent = recent;
  return recipe;
}

}  // namespace

TEST_CASE("the tokens stay that an engine scores highest, however scores and chunks are cut") {
  support::rng random(1701);
  for (index_t round = 0; round < support::scaled(40); ++round) {
    const index_t budget = random.between(1, 60), recent = random.between(0, budget);
    talk<> now(of_budget(budget, recent));
    std::vector<std::vector<index_t>> held(std::size_t(layers * kv_heads));
    index_t next = 0, scored = 0;
    for (index_t turn = 0; turn < 3; ++turn) {
      const index_t prompt = random.between(1, 90);
      CAPTURE(round, budget, recent, turn, prompt);
      for (index_t done = 0, more = 0; done < prompt; done += more) {
        more = random.between(1, prompt - done);
        now.chunk(more);
        const index_t end = next + done + more, upto = random.between(scored, end);
        now.score(scored, upto - scored);
        scored = upto;
      }
      const index_t end = next + prompt;
      for (auto& positions : held) {
        for (index_t at = next; at < end; ++at) positions.push_back(at);
      }
      if (scored < end) {
        CHECK_THAT(refusal_of([&] { now.held.end_prefill(now.id); }),
                   contains("tokens with scores in layer 0 is " + std::to_string(scored) +
                            "; expected all, which are " + std::to_string(end)));
        now.score(random.between(0, scored), 0);
        now.score(scored, end - scored);
      }
      now.held.end_prefill(now.id);
      for (index_t layer = 0; layer < layers; ++layer) {
        for (index_t h = 0; h < kv_heads; ++h) {
          auto& own = held[std::size_t(layer * kv_heads + h)];
          own = best(own, layer, h, budget, recent);
          REQUIRE(now.kept(layer, h) == own);
        }
      }
      next = scored = end;
      for (index_t step = random.between(0, 5); step > 0; --step, ++next) {
        now.step();
        for (auto& positions : held) positions.push_back(next);
      }
    }
  }
}

TEST_CASE("a score that is set again is the one that counts") {
  talk<> now(of_budget(3, 0));
  now.chunk(10);
  now.score(0, 10);
  const std::vector<float> high(2 * kv_heads, 1000.0f);
  for (index_t layer = 0; layer < layers; ++layer) now.held.set_scores(layer, now.id, 4, 2, high.data());
  now.held.end_prefill(now.id);
  for (index_t h = 0; h < kv_heads; ++h) {
    const auto kept = now.kept(1, h);
    CHECK(kept.size() == 3);
    CHECK(std::count(kept.begin(), kept.end(), 4) + std::count(kept.begin(), kept.end(), 5) == 2);
  }
}

TEST_CASE("choices at the ends of chunks need the scores of what they judge") {
  chunked recipe;
  recipe.retain.budget.tokens = 20;
  recipe.schedule.chunk = 16;
  talk<chunked> now(recipe);
  now.held.announce(now.id, 64);
  now.chunk(16);
  const auto before = now.kept(0, 0);
  CHECK_THAT(
      refusal_of([&] { now.chunk(0, 16); }),
      contains("tokens with scores in layer 0 is 0; expected all, which are 16; call set_scores for every chunk"));
  CHECK(now.kept(0, 0) == before);
  for (index_t done = 0; done < 64; done += 16) {
    if (done > 0) now.chunk(16);
    now.score(done, 16);
  }
  now.held.end_prefill(now.id);
  CHECK(now.kept(1, 1).size() == 20);
  // A chunk keeps ceil(20 * n / 64) of the n tokens so far.
  std::vector<index_t> held;
  for (index_t end = 16; end <= 64; end += 16) {
    const index_t keep = ceil_div(20 * end, 64), settled = index_t(held.size());
    std::vector<index_t> coming = counted(end);
    coming.erase(coming.begin(), coming.end() - 16);
    const auto chosen = best(coming, 1, 1, keep - settled, 0);
    held.insert(held.end(), chosen.begin(), chosen.end());
  }
  CHECK(now.kept(1, 1) == held);
}

TEST_CASE("scores that fit no tokens are refused, and forks, cuts and saved sequences keep theirs") {
  talk<> now(of_budget(8, 2));
  now.chunk(20);
  const auto set = [&](index_t first, index_t tokens, bool null = false) {
    const auto scores = scores_of(0, 0, 40);
    return refusal_of([&] { now.held.set_scores(0, now.id, first, tokens, null ? nullptr : scores.data()); });
  };
  CHECK_THAT(set(3, 2), contains("first position of scores is 3; expected at most 0"));
  CHECK_THAT(set(-1, 2), contains("first position of scores is -1"));
  CHECK_THAT(set(0, 21), contains("tokens of scores is 21; expected"));
  CHECK_THAT(set(0, -1), contains("tokens of scores is -1; expected"));
  CHECK_THAT(set(0, 2, true), contains("memory of scores is null"));
  CHECK(set(0, 0) == "nothing was thrown");
  CHECK_THROWS_AS(now.held.set_scores(layers, now.id, 0, 1, scores_of(0, 0, 1).data()), error);
  CHECK_THROWS_AS(now.held.set_scores(0, now.id + 1, 0, 1, scores_of(0, 0, 1).data()), error);

  now.score(0, 20);
  index_t fork = now.held.fork(now.id);
  now.held.truncate(now.id, 12);  // a prompt's tokens can be taken back one by one
  now.chunk(10);
  now.score(12, 10);
  now.held.end_prefill(now.id);
  CHECK(now.kept(0, 1) == best(counted(22), 0, 1, 8, 2));
  std::swap(now.id, fork);
  now.held.end_prefill(now.id);
  CHECK(now.kept(0, 1) == best(counted(20), 0, 1, 8, 2));

  now.step();
  const auto bytes = support::saved(now.held, now.id);
  const index_t loaded = support::loaded(now.held, bytes);
  CHECK(support::saved(now.held, loaded) == bytes);
  now.id = loaded;
  now.chunk(30);
  CHECK_THAT(refusal_of([&] { now.held.end_prefill(now.id); }), contains("is 20; expected all, which are 51"));
  now.score(20, 31);
  now.held.end_prefill(now.id);
  CHECK(now.kept(1, 0).size() == 8);
}
