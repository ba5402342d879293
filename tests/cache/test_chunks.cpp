// A prompt that is compressed chunk by chunk: TANGRAM's rule against a cache of token lists in double.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/attention/gathered_decode.hpp>
#include <tessera/budget/two_stage.hpp>
#include <tessera/cache.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/schedule/once.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/scorer/hybrid_min_max.hpp>
#include <tessera/scorer/key_norm.hpp>
#include <tessera/scorer/page_min_max.hpp>
#include <tessera/selector/tokens_or_pages.hpp>
#include <tessera/selector/top_pages.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;
using support::rng;
namespace oracle = support::oracle;

namespace {

constexpr int dim = 64;

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
  void prefill(Cache& kv, index_t id, index_t first, index_t count) const {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      kv.prefill(layer, id, queries(layer, first, count), keys(layer, first, count), keys(layer, first, count));
    }
  }
  /// A step; returns the outputs of all layers.
  template <class Cache>
  std::vector<float> step(Cache& kv, index_t id, index_t next) const {
    std::vector<float> out(std::size_t(shape.layers * shape.q_heads * dim));
    const batch now = kv.prepare_step({id}, 1);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      kv.decode(layer, now, queries(layer, next, 1), keys(layer, next, 1), keys(layer, next, 1),
                nhd_rows(out.data() + offset_t(layer) * shape.q_heads * dim, 1, shape.q_heads, dim));
    }
    return out;
  }
};

/// One head by the rule: what lies before `open` stays, the rest of what is stored competes by the chunk's last queries.
struct head_by_rule {
  std::vector<index_t> stored;
  index_t before = 0, seen = 0;  // held when the turn began; tokens of the turn so far
  index_t open = 0;              // position of the first token that competes

  void begin_turn(index_t next) {
    before = index_t(stored.size());
    seen = 0;
    open = next;
  }

  /// Returns whether rounding may choose otherwise.
  bool judge(const text& of, index_t layer, index_t head, index_t first, index_t count, index_t window, index_t pool,
             index_t share) {
    for (index_t t = 0; t < count; ++t) stored.push_back(first + t);
    seen += count;
    const index_t rows = std::min(window, count), next = first + count, group = of.shape.q_heads / of.shape.kv_heads;
    const index_t settled = index_t(std::lower_bound(stored.begin(), stored.end(), open) - stored.begin());
    const index_t wanted = before + index_t((std::int64_t(share) * seen + 63) / 64);
    const index_t keep = std::clamp(wanted, settled + rows, index_t(stored.size()));
    std::vector<double> sums(stored.size(), 0.0);
    std::vector<const float*> held;
    for (const index_t at : stored) held.push_back(of.keys(layer, at, 1).row(0, 0, head));
    for (index_t row = next - rows; row < next; ++row) {
      for (index_t g = 0; g < group; ++g) {
        const auto seen_by =
            oracle::attend(of.queries(layer, row, 1).row(0, 0, head * group + g), row, held, {}, stored, dim, dim);
        for (std::size_t s = 0; s < sums.size(); ++s) sums[s] += seen_by.probabilities[s];
      }
    }
    sums.resize(sums.size() - std::size_t(rows));
    const auto pooled = oracle::max_pool(sums, pool);
    const std::vector<double> open_scores(pooled.begin() + settled, pooled.end());
    const index_t room = keep - settled - rows;
    bool ambiguous = false;
    if (room > 0 && room < index_t(open_scores.size())) {
      const double last = open_scores[std::size_t(oracle::preference(open_scores)[std::size_t(room - 1)])];
      for (const double score : open_scores) ambiguous |= score != last && std::abs(score - last) <= 3e-5 * last;
    }
    std::vector<index_t> kept(stored.begin(), stored.begin() + settled);
    for (const index_t slot : oracle::top_k(open_scores, room)) kept.push_back(stored[std::size_t(settled + slot)]);
    kept.insert(kept.end(), stored.end() - rows, stored.end());
    stored = kept;
    open = next - rows;
    return ambiguous;
  }
};

std::shared_ptr<cpu::executor> one_thread() { return std::make_shared<cpu::executor>(1); }

template <class Scorer, class Schedule>
using by_shares =
    recipe<retain<Scorer, calibrated, top_tokens>, dense<fp32, dim>, retrieve_all, dense_decode, Schedule>;

}  // namespace

TEST_CASE("tangram keeps in chunks and turns what its rule keeps") {
  rng random(1210);
  index_t compared = 0, ambiguous = 0;
  for (index_t i = 0; i < support::scaled(10'000); ++i) {
    const index_t kv_heads = random.between(1, 3), group = random.pick({1, 1, 2});
    const model_shape shape{random.pick({1, 1, 2}), kv_heads * group, kv_heads};
    std::vector<index_t> shares;
    std::vector<double> table;
    for (index_t j = 0; j < shape.layers * kv_heads; ++j) {
      shares.push_back(random.chance(0.1) ? 64 : random.between(1, 50));
      table.push_back(double(shares.back()) / 64);
    }
    tangram<fp32, dim> recipe;
    recipe.retain.scorer.window = random.pick({1, 2, 5, 8});
    recipe.retain.scorer.pool = random.pick({1, 3, 7});
    recipe.retain.budget.shares = {table.data(), shape.layers, kv_heads};
    recipe.schedule.chunk = random.pick({4, 9, 16, 30, 1'000});
    const index_t window = recipe.retain.scorer.window, chunk = recipe.schedule.chunk;
    const index_t turns = random.between(1, 3);
    const text of(random, shape, 200);
    cache<tangram<fp32, dim>> kv(shape, recipe, one_thread());
    const index_t id = kv.open();
    std::vector<head_by_rule> heads(table.size());
    index_t next = 0;
    for (index_t turn = 0; turn < turns; ++turn) {
      const index_t prompt = random.pick({1, random.between(1, 40), random.between(1, 60)});
      CAPTURE(i, turn, prompt, chunk, window, recipe.retain.scorer.pool, kv_heads, group, shape.layers);
      if (random.chance(0.5)) kv.announce(id, prompt);
      for (head_by_rule& head : heads) head.begin_turn(next);
      bool open_to_rounding = false;
      for (index_t done = 0; done < prompt; done += chunk) {
        const index_t count = std::min(chunk, prompt - done);
        // An engine may hand a chunk over in pieces.
        for (index_t piece = 0; piece < count;) {
          const index_t part = random.chance(0.7) ? count - piece : random.between(1, count - piece);
          of.prefill(kv, id, next + done + piece, part);
          piece += part;
        }
        for (std::size_t h = 0; h < heads.size(); ++h) {
          open_to_rounding |= heads[h].judge(of, index_t(h) / kv_heads, index_t(h) % kv_heads, next + done, count,
                                             window, recipe.retain.scorer.pool, shares[h]);
        }
      }
      next += prompt;
      kv.end_prefill(id);
      for (std::size_t h = 0; h < heads.size(); ++h) {
        const auto kept = kv.positions(index_t(h) / kv_heads, id, index_t(h) % kv_heads);
        CAPTURE(h, shares[h]);
        ++compared;
        REQUIRE(kept.size() == heads[h].stored.size());
        if (!open_to_rounding) REQUIRE(kept == heads[h].stored);
        heads[h].stored = kept;
      }
      ambiguous += open_to_rounding;
      for (index_t steps = random.between(0, 3); steps > 0; --steps) {  // an answer stays
        of.step(kv, id, next);
        for (head_by_rule& head : heads) head.stored.push_back(next);
        ++next;
      }
    }
  }
  INFO(compared << " sets, " << ambiguous << " turns open to rounding");
  CHECK(ambiguous < 0.05 * compared + 5);
}

TEST_CASE("a profile of ones is dense attention to the bit, in any chunks") {
  rng random(1211);
  const model_shape shape{2, 4, 2};
  const text of(random, shape, 120);
  const std::vector<double> ones(4, 1.0);
  tangram<fp32, dim> recipe;
  recipe.retain.budget.shares = {ones.data(), 2, 2};
  recipe.schedule.chunk = 16;
  cache<tangram<fp32, dim>> kv(shape, recipe, one_thread());
  cache<by_shares<observation_window, once>> whole(shape, {}, one_thread());
  whole.set_budget(1'000);
  const index_t id = kv.open(), other = whole.open();
  for (index_t first = 0; first < 96; first += 16) of.prefill(kv, id, first, 16);
  of.prefill(whole, other, 0, 96);
  kv.end_prefill(id);
  whole.end_prefill(other);
  for (index_t next = 96; next < 100; ++next) CHECK(of.step(kv, id, next) == of.step(whole, other, next));
}

TEST_CASE("while a prompt comes in, a head holds its share and one chunk at most") {
  rng random(1212);
  const model_shape shape{2, 2, 2};
  const text of(random, shape, 400);
  const double table[] = {0.5, 0.25, 0.125, 1.0};
  tangram<fp32, dim> recipe;
  recipe.retain.scorer.window = 4;
  recipe.retain.budget.shares = {table, 2, 2};
  recipe.schedule.chunk = 64;
  cache<tangram<fp32, dim>> kv(shape, recipe, one_thread());
  const index_t id = kv.open();
  for (index_t first = 0; first < 384; first += 32) {
    of.prefill(kv, id, first, 32);
    const index_t judged = first / 64 * 64;
    for (index_t h = 0; h < 4; ++h) {
      REQUIRE(kv.length(h / 2, id, h % 2) == index_t(std::ceil(table[h] * judged)) + first + 32 - judged);
    }
  }
  kv.end_prefill(id);
  for (index_t h = 0; h < 4; ++h) CHECK(kv.length(h / 2, id, h % 2) == index_t(std::ceil(table[h] * 384)));
}

TEST_CASE("what is ranked at a prompt's end are the tokens that competed then") {
  rng random(1216);
  const model_shape shape{1, 2, 1};
  const text of(random, shape, 64);
  const double table[] = {0.5};
  tangram<fp32, dim> recipe;
  recipe.retain.scorer.window = 4;
  recipe.retain.budget.shares = {table, 1, 1};
  recipe.schedule.chunk = 32;
  cache<tangram<fp32, dim>> kv(shape, recipe, one_thread());
  kv.trace_ranked(true);
  const index_t id = kv.open();
  of.prefill(kv, id, 0, 32);
  of.prefill(kv, id, 32, 32);
  kv.end_prefill(id);
  const auto& ranked = kv.ranked(0, id);  // the first chunk's window, and the second without its own
  REQUIRE(ranked.positions[0].size() == 4 + 28);
  for (index_t i = 0; i < 32; ++i) CHECK(ranked.positions[0][std::size_t(i)] == 28 + i);
  CHECK(ranked.scores[0].size() == 32);
}

TEST_CASE("a uniform share is known once a prompt is announced; without that a prompt is one chunk") {
  rng random(1213);
  const model_shape shape{1, 2, 1};
  const text of(random, shape, 400);
  tangram<fp32, dim> recipe;
  recipe.set_budget(50);
  recipe.retain.scorer.window = 4;
  recipe.schedule.chunk = 100;
  cache<tangram<fp32, dim>> kv(shape, recipe, one_thread());
  const index_t told = kv.open(), untold = kv.open();
  kv.announce(told, 300);
  for (index_t first = 0; first < 300; first += 100) {
    of.prefill(kv, told, first, 100);
    of.prefill(kv, untold, first, 100);
    CHECK(kv.length(0, told, 0) == (first * 50 + 299) / 300 + 100);
    CHECK(kv.length(0, untold, 0) == first + 100);
  }
  kv.end_prefill(told);
  kv.end_prefill(untold);
  CHECK(kv.length(0, told, 0) == 50);
  CHECK(kv.length(0, untold, 0) == 50);
  of.prefill(kv, told, 300, 60);  // 50 of 360, as of all tokens so far: 9 more
  kv.end_prefill(told);
  CHECK(kv.length(0, told, 0) == 59);
}

TEST_CASE("an announced prompt comes as it was announced") {
  rng random(1214);
  const model_shape shape{2, 2, 1};
  const text of(random, shape, 100);
  cache<tangram<fp32, dim>> kv(shape, {}, one_thread());
  const index_t id = kv.open();
  CHECK_THROWS_WITH(kv.announce(id, 0), contains("tokens of the prompt is 0; expected 1 to"));
  CHECK_THROWS_WITH(kv.announce(id + 1, 5), contains("sequence is 1"));
  kv.announce(id, 40);
  of.prefill(kv, id, 0, 30);
  CHECK_THROWS_WITH(kv.announce(id, 40), contains("announce a prompt before its first chunk"));
  CHECK_THROWS_WITH(of.prefill(kv, id, 30, 11), contains("tokens of this turn is 41; expected at most those that were "
                                                         "announced, which are 40"));
  CHECK_THROWS_WITH(kv.end_prefill(id), contains("tokens of this turn is 30; expected those that were announced, which "
                                                 "are 40; prefill the rest of the prompt"));
  of.prefill(kv, id, 30, 10);
  CHECK_NOTHROW(kv.end_prefill(id));
  of.prefill(kv, id, 40, 20);  // the next turn's need not be announced
  CHECK_NOTHROW(kv.end_prefill(id));
}

TEST_CASE("a profile of another model is refused when a cache is made") {
  const std::vector<double> table(8, 0.5);
  tangram<fp32, dim> recipe;
  recipe.retain.budget.shares = {table.data(), 2, 4};
  CHECK_THROWS_WITH((cache<tangram<fp32, dim>>({2, 4, 2}, recipe, one_thread())),
                    contains("kv_heads of the profile is 4; expected those of the model, which are 2"));
  CHECK_THROWS_WITH((cache<tangram<fp32, dim>>({3, 4, 4}, recipe, one_thread())),
                    contains("layers of the profile is 2; expected those of the model, which are 3"));
}

TEST_CASE("shares go with other scorers, in one piece and in chunks") {
  rng random(1215);
  const model_shape shape{1, 4, 2};
  const text of(random, shape, 200);
  const double table[] = {0.5, 0.25};
  const auto counts_of = [&](auto recipe) {
    recipe.retain.budget.shares = {table, 1, 2};
    if constexpr (requires { recipe.schedule.chunk; }) recipe.schedule.chunk = 20;
    cache<decltype(recipe)> kv(shape, recipe, one_thread());
    const index_t id = kv.open();
    std::vector<index_t> counts;
    index_t next = 0;
    for (const index_t prompt : {80, 40}) {
      for (index_t done = 0; done < prompt; done += 20) of.prefill(kv, id, next + done, 20);
      next += prompt;
      kv.end_prefill(id);
      of.step(kv, id, next++);
      for (index_t h = 0; h < 2; ++h) counts.push_back(kv.length(0, id, h));
    }
    return counts;
  };
  const std::vector<index_t> expected{41, 21, 62, 32};  // half and a quarter of 80, and of 40; each answer is one token
  auto h2o = by_shares<accumulated_attention, once>{};
  h2o.retain.scorer.recent = 4;
  CHECK(counts_of(h2o) == expected);
  auto h2o_chunks = by_shares<accumulated_attention, each_chunk>{};
  h2o_chunks.retain.scorer.recent = 4;
  CHECK(counts_of(h2o_chunks) == expected);
  CHECK(counts_of(by_shares<key_norm, each_chunk>{}) == expected);
  auto once_window = by_shares<observation_window, once>{};
  once_window.retain.scorer.window = 4;
  CHECK(counts_of(once_window) == expected);
}

TEST_CASE("a second stage reads of what the shares have left, chunk by chunk or at once") {
  rng random(1217);
  const model_shape shape{2, 4, 2};
  const text of(random, shape, 200);
  const double table[] = {0.5, 0.25, 0.25, 0.5};
  const auto converse = [&](auto recipe) {
    recipe.retain.scorer.window = 4;
    if constexpr (requires { recipe.schedule.chunk; }) recipe.schedule.chunk = 20;
    cache<decltype(recipe)> kv(shape, recipe, one_thread());
    kv.trace_attended(true);
    const index_t id = kv.open();
    index_t next = 0, held[] = {0, 0, 0, 0};
    for (const index_t prompt : {80, 40}) {
      for (index_t done = 0; done < prompt; done += 20) of.prefill(kv, id, next + done, 20);
      next += prompt;
      kv.end_prefill(id);
      for (index_t h = 0; h < 4; ++h) {
        held[h] += index_t(table[h] * prompt);
        REQUIRE(kv.length(h / 2, id, h % 2) == held[h]);
      }
      const auto out = of.step(kv, id, next);
      for (index_t h = 0; h < 8; ++h) {  // attention in double over what the step says that it read, all of it stored
        const index_t layer = h / 4, head = h % 4 / 2;
        const auto attended = kv.attended(layer, id)[std::size_t(head)], stored = kv.positions(layer, id, head);
        REQUIRE(std::includes(stored.begin(), stored.end(), attended.begin(), attended.end()));
        REQUIRE(attended.size() < stored.size());
        std::vector<const float*> rows;
        for (const index_t at : attended) rows.push_back(of.keys(layer, at, 1).row(0, 0, head));
        const auto expected =
            oracle::attend(of.queries(layer, next, 1).row(0, 0, h % 4), next, rows, rows, attended, dim, dim);
        for (std::size_t d = 0; d < dim; ++d)
          REQUIRE(std::abs(double(out[std::size_t(h) * dim + d]) - expected.out[d]) < 1e-5);
      }
      ++next;
      for (index_t& one : held) ++one;
    }
  };
  recipe<retain<observation_window, two_stage<calibrated>, top_tokens>, dense<fp32, dim>,
         retrieve<hybrid_min_max, tokens_or_pages>, gathered_decode, once>
      planned_once;
  planned_once.set_budget(16);
  planned_once.retain.budget.max_new = 10;
  planned_once.retain.budget.inner.shares = {table, 2, 2};
  converse(planned_once);
  recipe<retain<observation_window, calibrated, top_tokens>, dense<fp32, dim>, retrieve<page_min_max, top_pages>,
         gathered_decode, each_chunk>
      in_chunks;
  in_chunks.retain.budget.shares = {table, 2, 2};
  in_chunks.retrieve.tokens = 16;
  in_chunks.retrieve.scorer.page = 4;
  converse(in_chunks);
}
