// Strategies that are searched beside a cache: when segments end, what takes their place and when, and what a stopped thread leaves.
#include "catch.hpp"

#include <numeric>
#include <system_error>

#include <tessera/cache.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/mosaickv.hpp>

#include "backend/cpu/read/packed_oracle.hpp"
#include "support/random.hpp"
#include "support/searched_rows.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
namespace exact = support::packed_oracle;

namespace {

using namespace support::searched;
using mosaic = mosaickv<fp32, dim>;

mosaic searching() { return support::searched::searching<mosaic>(); }

/// All the way channels fall alike.
std::vector<float> rows_of(index_t token, index_t layer, index_t side, index_t heads) {
  return support::searched::rows_of<float>(token, layer, side, heads, 0.12);
}

template <class Recipe = mosaic>
struct conversation {
  cache<Recipe> held;
  index_t id, tokens = 0;
  std::vector<float> out;

  explicit conversation(const Recipe& recipe, index_t prompt = 128)
      : held({layers, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1)), id(held.open()) {
    for (index_t t = 0; t < prompt; ++t, ++tokens) {
      for (index_t layer = 0; layer < layers; ++layer) {
        const auto k = rows_of(tokens, layer, 0, kv_heads), v = rows_of(tokens, layer, 1, kv_heads),
                   q = rows_of(tokens, layer, 2, q_heads);
        held.prefill(layer, id, given(q, q_heads), given(k, kv_heads), given(v, kv_heads));
      }
    }
    held.end_prefill(id);
  }
  static rows_view<const float> given(const std::vector<float>& rows, index_t heads) {
    return nhd_rows<const float>(rows.data(), 1, heads, dim);
  }
  void step() {
    const batch now = held.prepare_step({id}, 1);
    out.assign(std::size_t(layers * q_heads * dim), 7.0f);
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto k = rows_of(tokens, layer, 0, kv_heads), v = rows_of(tokens, layer, 1, kv_heads),
                 q = rows_of(tokens, layer, 2, q_heads);
      held.decode(layer, now, given(q, q_heads), given(k, kv_heads), given(v, kv_heads),
                  nhd_rows(out.data() + layer * q_heads * dim, 1, q_heads, dim));
    }
    ++tokens;
  }
  /// Rows of the segments of a layer, and the whole ones behind them.
  std::vector<index_t> parts(index_t layer) {
    const auto view = held.view(layer, id);
    std::vector<index_t> result;
    for (const auto& segment : *view.segments) result.push_back(segment->lengths[0]);
    result.push_back(view.whole.length(0, 0));
    return result;
  }
  strategy_report report() const { return held.strategies(id); }
};

double worst_difference(const exact::numbers& a, const std::vector<float>& b, index_t head) {
  double worst = 0;
  for (std::size_t d = 0; d < a.size(); ++d)
    worst = std::max(worst, std::abs(a[d] - double(b[std::size_t(head) * a.size() + d])));
  return worst;
}

}  // namespace

TEST_CASE("answers are those with the strategies computed at once and put in place before the same steps") {
  const index_t steps = support::scaled(2000);
  conversation<> threaded(searching());
  std::vector<index_t> swaps;
  std::vector<std::vector<float>> answers;
  for (index_t i = 0; i < steps; ++i) {
    const index_t before = threaded.report().searched;
    // Now and then the caller has other things to do, until the thread is done: both orders of events are met.
    for (int wait = 0; i % 97 == 96 && wait < 2000 && threaded.report().searching; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    threaded.step();
    if (threaded.report().searched > before) swaps.push_back(i);
    answers.push_back(threaded.out);
  }
  CHECK(swaps.size() >= std::size_t(steps / 1000));
  CHECK(threaded.report().problem.empty());

  conversation<> again(searching());
  const auto worker = std::make_shared<at_once>();
  again.held.search_on(worker);
  for (index_t i = 0; i < steps; ++i) {
    if (std::binary_search(swaps.begin(), swaps.end(), i)) worker->publish();
    again.step();
    REQUIRE(support::same_bits(again.out, answers[std::size_t(i)]));
  }
  CHECK(again.report().searched == threaded.report().searched);
  for (index_t layer = 0; layer < layers; ++layer) CHECK(again.parts(layer) == threaded.parts(layer));
}

TEST_CASE(
    "a segment ends when it has lost too much, and what takes its place is packed by the strategy that is best for "
    "it") {
  mosaic recipe = searching();
  recipe.layout.rows.strategy.least_segment = 128;
  recipe.layout.rows.segment = 256;
  conversation<> now(recipe, 256);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  while (worker->held.empty()) {
    now.step();
    REQUIRE(now.tokens < 4000);
  }
  CHECK(now.report().searching);
  const auto before = now.parts(0);
  REQUIRE(before.size() >= 3);
  CHECK(before[0] == 256);
  const index_t ended = before[1];
  CHECK(ended % 32 == 0);
  CHECK(ended >= 128);
  CHECK(ended <= 160);  // tokens like the prompt's lose at least what the prompt's lose, of which 128 are allowed
  CHECK(now.parts(1)[1] == ended);
  for (int i = 0; i < 70; ++i) now.step();  // the next tokens have the prompt's strategy, behind it
  const auto waiting = now.parts(0);
  CHECK(waiting[1] == ended);
  CHECK(waiting.size() == 4);
  const auto old = now.held.view(0, now.id);
  CHECK((*old.segments)[1]->basis == (*old.segments)[0]->basis);
  CHECK((*old.segments)[2]->format == (*old.segments)[0]->format);

  worker->publish();
  now.step();
  CHECK(now.report().searched == 1);
  CHECK_FALSE(now.report().searching);
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto view = now.held.view(layer, now.id);
    const auto& made = *(*view.segments)[1];
    CHECK(made.lengths == std::vector<index_t>(kv_heads, ended));
    strategy_search<top_groups> search(recipe.layout.rows.key);
    for (index_t h = 0; h < kv_heads; ++h) {
      for (const index_t side : {0, 1}) {
        const auto load = [&](index_t i, float* to) {
          std::copy_n(rows_of(256 + i, layer, side, kv_heads).data() + h * dim, dim, to);
        };
        search.add(ended, dim, 48, "rows", load);
        if (side == 0) search.add_blocks(ended, dim, load);
      }
    }
    const segment_strategy best = search.best(0.1f, 0.5f, 32);
    CHECK(made.format.k.stored_channels == index_t(best.channels * float(dim)));
    CHECK(made.format.v.stored_channels == made.format.k.stored_channels);
    CHECK(made.format.k.group == best.group);
    CHECK(made.format.block == best.block);
    // What is stored is nearer to what was given than before.
    double error = 0, energy = 0;
    for (index_t h = 0; h < kv_heads; ++h) {
      const auto stored = exact::tokens_of(view, h);
      REQUIRE(index_t(stored.size()) == now.tokens);
      for (index_t t = 128; t < 128 + ended; ++t) {
        const auto k = rows_of(t, layer, 0, kv_heads);
        for (index_t d = 0; d < dim; ++d) {
          const double x = double(k[std::size_t(h * dim + d)]);
          error += std::pow(stored[std::size_t(t)].key[std::size_t(d)] - x, 2);
          energy += x * x;
        }
      }
      // The tail is as it was given.
      const auto newest = rows_of(now.tokens - 1, layer, 0, kv_heads);
      CHECK(worst_difference(stored.back().key, newest, h) < 1e-6);
    }
    CHECK(error / energy < 0.15);
  }
  // Its basis is one of fewer than 256 rows: the next tokens wait until they are as many, and get one of their own.
  const std::size_t segments = now.parts(0).size();
  while (now.parts(0).size() == segments) {
    now.step();
    REQUIRE(now.tokens < 2000);
  }
  const auto own = now.held.view(0, now.id);
  CHECK(own.segments->back()->basis != (*own.segments)[1]->basis);
  CHECK(own.segments->back()->lengths == std::vector<index_t>(kv_heads, 256));
}

TEST_CASE("tokens behind a basis of few rows wait for one of their own, where strategies are searched too") {
  mosaic recipe = searching();
  recipe.layout.rows.segment = 512;
  recipe.layout.rows.strategy.least_segment = 512;
  conversation<> now(recipe, 150);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  CHECK(now.parts(0) == std::vector<index_t>{150});  // a basis wants 4 rows for each element
  while (now.tokens < 2200 && worker->held.empty()) now.step();
  REQUIRE(worker->held.size() == 1);  // the open segment has 512 rows
  const auto view = now.held.view(0, now.id);
  const auto parts = now.parts(0);
  REQUIRE(parts.size() == 5);
  CHECK(parts[0] >= 256);
  CHECK(parts[1] >= parts[0]);
  CHECK(parts[2] == 512);
  CHECK(parts[3] == 512);
  for (std::size_t i = 1; i < 3; ++i) CHECK((*view.segments)[i]->basis != (*view.segments)[i - 1]->basis);
  CHECK((*view.segments)[3]->basis == (*view.segments)[2]->basis);
  CHECK((*view.segments)[3]->format == (*view.segments)[2]->format);
  worker->publish();
  now.step();
  CHECK((*now.held.view(0, now.id).segments)[3]->basis != (*now.held.view(0, now.id).segments)[2]->basis);
  for (int i = 0; i < 100; ++i) now.step();
  CHECK(now.held.view(0, now.id).segments->back()->basis == (*now.held.view(0, now.id).segments)[3]->basis);
}

TEST_CASE("rows behind a search that ends late join the basis that it has found") {
  mosaic recipe = searching();
  recipe.layout.rows.segment = 512;
  recipe.layout.rows.strategy.least_segment = 512;
  conversation<> now(recipe, 512);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  while (now.tokens < 2000 && worker->held.empty()) now.step();
  REQUIRE(worker->held.size() == 1);
  for (int i = 0; i < 70; ++i) now.step();  // these join the old basis
  worker->publish();
  now.step();
  const auto view = now.held.view(0, now.id);
  REQUIRE(view.segments->size() == 3);
  CHECK((*view.segments)[1]->basis != (*view.segments)[0]->basis);
  CHECK((*view.segments)[2]->basis == (*view.segments)[0]->basis);
  for (int i = 0; i < 200; ++i) {
    now.step();
    REQUIRE(now.parts(0).back() < 64);
  }
  CHECK(now.held.view(0, now.id).segments->back()->basis == (*now.held.view(0, now.id).segments)[1]->basis);
}

TEST_CASE(
    "where the thread is stopped in the middle of a segment, the cache goes on with the old strategy and says so") {
  conversation<> now(searching());
  const auto worker = std::make_shared<at_once>();
  worker->stopping = true;
  now.held.search_on(worker);
  while (worker->held.empty()) now.step();
  worker->publish();
  now.step();
  CHECK(now.report().unchanged == 1);
  CHECK(now.report().searched == 0);
  CHECK_THAT(now.report().problem, contains("stopped"));

  conversation<> other(searching());
  other.held.searcher()->stop();
  for (int i = 0; i < 1200; ++i) other.step();
  CHECK(other.report().unchanged >= 2);
  CHECK_THAT(other.report().problem, contains("stopped"));
  const auto view = other.held.view(1, other.id);
  for (const auto& segment : *view.segments) {
    CHECK(segment->format == view.segments->front()->format);
    CHECK(segment->basis == view.segments->front()->basis);
  }
}

TEST_CASE("a search that never ends costs no more than the rows that it searches, and a segment's") {
  mosaic recipe = searching();
  recipe.layout.rows.segment = 512;
  conversation<> now(recipe, 512);
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  std::vector<offset_t> held;
  for (int i = 0; i < 2400; ++i) {
    now.step();
    held.push_back(now.held.bytes(now.id));
  }
  // Beside a cache whose segments all have the strategy of the first one.
  const auto first = now.held.view(0, now.id).segments->front()->format;
  recipe.layout.rows.strategy.strategy = strategy_choice::fixed;
  recipe.layout.rows =
      recipe.layout.rows.by_strategy({float(first.k.stored_channels) / float(dim), first.k.group, first.block});
  recipe.retrieve.selector.block = first.block;
  conversation<> fixed(recipe, 512);
  offset_t most = 0;
  for (const offset_t bytes : held) {
    fixed.step();
    most = std::max(most, bytes - fixed.held.bytes(fixed.id));
  }
  CHECK(worker->held.size() == 1);
  CHECK(now.report().unchanged >= 3);
  CHECK(most > layers * kv_heads * offset_t(2 * dim * 4) * 400);
  CHECK(most <= layers * kv_heads * offset_t(2 * dim * 4) * (2 * 512 + 64));
  worker->publish();
  now.step();
  CHECK(now.report().searched == 1);
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto parts = now.parts(layer);
    CHECK(std::accumulate(parts.begin(), parts.end(), 0) == now.tokens);
  }
}

TEST_CASE("copies of a cache in the middle of a search, turns, closed sequences and dropped tokens") {
  conversation<> now(searching());
  const auto worker = std::make_shared<at_once>();
  now.held.search_on(worker);
  while (worker->held.empty()) now.step();
  auto copy = now;
  worker->publish();
  for (int i = 0; i < 40; ++i) now.step();
  for (int i = 0; i < 40; ++i) copy.step();
  CHECK(support::same_bits(now.out, copy.out));
  CHECK(copy.report().searched == 1);
  copy.held.close(copy.id);
  const index_t fresh = copy.held.open();
  CHECK(fresh == copy.id);
  CHECK(copy.report().searched == 0);
  now.step();

  // A first stage that drops packed tokens in every step: segments stay as they are.
  using dropping = recipe<retain<accumulated_attention, uniform, top_tokens>, mosaic_rows<dense<fp32, dim>>,
                          retrieve_all, dense_decode, each_step>;
  dropping thin;
  thin.set_budget(100);
  thin.layout.rows.strategy = searching().layout.rows.strategy;
  conversation<dropping> dropped(thin);
  for (int i = 0; i < 400; ++i) dropped.step();
  CHECK(dropped.report().searched == 0);
  CHECK(dropped.held.length(0, dropped.id, 0) == 100);
}

TEST_CASE("segments end at their length, whatever is asked of the least one, and where no search can begin") {
  struct no_thread final : background {
    void start(std::shared_ptr<background_task>) override {
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }
  };
  const auto longest_of = [](conversation<>& now) {
    index_t longest = 0;
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto parts = now.parts(layer);
      for (std::size_t i = 1; i + 1 < parts.size(); ++i) longest = std::max(longest, parts[i]);
    }
    return longest;
  };
  mosaic recipe = searching();
  conversation<> alone(recipe, 64);
  alone.held.search_on(std::make_shared<no_thread>());
  for (int i = 0; i < 700; ++i) alone.step();
  CHECK(longest_of(alone) <= 128 + 32);
  CHECK(alone.report().unchanged >= 4);
  CHECK_FALSE(alone.report().problem.empty());

  recipe.layout.rows.strategy.least_segment = 1024;
  conversation<> least(recipe, 64);
  for (int i = 0; i < 700; ++i) least.step();
  CHECK(longest_of(least) <= 128 + 32);
}

TEST_CASE("turns without a step end segments too") {
  mosaic recipe = searching();
  conversation<> now(recipe, 64);
  offset_t most = 0;
  for (int turn = 0; turn < 12; ++turn) {
    for (index_t layer = 0; layer < layers; ++layer) {
      std::vector<float> k, v, q;
      for (index_t t = 0; t < 128; ++t) {
        const auto add = [&](std::vector<float>& to, index_t side, index_t heads) {
          const auto row = rows_of(now.tokens + t, layer, side, heads);
          to.insert(to.end(), row.begin(), row.end());
        };
        add(k, 0, kv_heads), add(v, 1, kv_heads), add(q, 2, q_heads);
      }
      now.held.prefill(layer, now.id, nhd_rows<const float>(q.data(), 128, q_heads, dim),
                       nhd_rows<const float>(k.data(), 128, kv_heads, dim),
                       nhd_rows<const float>(v.data(), 128, kv_heads, dim));
    }
    now.held.end_prefill(now.id);
    now.tokens += 128;
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto parts = now.parts(layer);
      for (std::size_t i = 1; i + 1 < parts.size(); ++i) most = std::max<offset_t>(most, parts[i]);
    }
  }
  CHECK(most <= 2 * 128 + 32);  // what a turn brings comes as a whole
}

TEST_CASE("a cache wants a thread to search on") {
  conversation<> now(searching());
  CHECK_THROWS_AS(now.held.search_on(nullptr), error);
}
