// Saved sequences: what damage, another cache or a wrong moment comes to, and searches that have not ended.
#include "catch.hpp"

#include <tessera/cache.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/sentencekv.hpp>
#include <tessera/methods/snapkv.hpp>

#include "laws/cpu_side.hpp"
#include "support/calls/saved_bytes.hpp"
#include "support/searched_rows.hpp"

using namespace tessera;
using support::loaded;
using support::saved;

namespace {

constexpr int dim = 64;
const model_shape small{1, 2, 1};

template <class Recipe>
cache<Recipe> made(const Recipe& recipe = {}, const model_shape& shape = small) {
  return cache<Recipe>(shape, recipe, std::make_shared<cpu::executor>(1));
}

/// Writes a prompt of so many tokens, and a step.
template <class Cache>
index_t written(Cache& held, index_t tokens, const sequence_options& options = {}) {
  support::rng random(77);
  const model_shape& shape = held.shape();
  const index_t id = held.open(options);
  const auto rows = [&](index_t count, index_t heads) {
    return support::normals(random, std::size_t(count * heads * dim));
  };
  std::vector<std::uint8_t> boundaries(std::size_t(tokens), 0);
  for (std::size_t t = 4; t < boundaries.size(); t += 5) boundaries[t] = 1;
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    const auto q = rows(tokens, shape.q_heads), k = rows(tokens, shape.kv_heads), v = rows(tokens, shape.kv_heads);
    held.prefill(layer, id, nhd_rows(q.data(), tokens, shape.q_heads, dim),
                 nhd_rows(k.data(), tokens, shape.kv_heads, dim), nhd_rows(v.data(), tokens, shape.kv_heads, dim),
                 boundaries);
  }
  held.end_prefill(id);
  return id;
}

template <class Call>
std::string said(const Call& call) {
  try {
    call();
  } catch (const error& refusal) {
    return refusal.what();
  }
  return {};
}

/// Every byte damaged, and every length: one sentence each, and nothing is opened.
template <class Recipe>
void survives_damage(index_t tokens, const Recipe& recipe = {}) {
  auto source = made(recipe), target = made(recipe);
  const auto bytes = saved(source, written(source, tokens));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    auto damaged = bytes;
    damaged[at] = static_cast<unsigned char>(damaged[at] ^ (1u << (at % 8)));
    CAPTURE(at);
    REQUIRE(said([&] { loaded(target, damaged); }).find("; expected ") != std::string::npos);
    REQUIRE(said([&] { loaded(target, {bytes.begin(), bytes.begin() + std::ptrdiff_t(at)}); }).find("; expected ") !=
            std::string::npos);
  }
  REQUIRE(loaded(target, bytes) == 0);
}

}  // namespace

TEST_CASE("saved bytes that are damaged anywhere, or cut anywhere, are refused, and nothing is opened") {
  survives_damage<snapkv<fp16, dim>>(7);
  sentencekv<fp16, dim> sentences;
  survives_damage(12, sentences);
  mosaickv<fp16, dim> packed;
  packed.layout.rows.segment = 70;
  survives_damage(70, packed);
}

TEST_CASE("saved bytes of another recipe, parameter, shape or version are refused in a sentence that names it") {
  auto source = made<snapkv<fp16, dim>>();
  auto bytes = saved(source, written(source, 20));
  snapkv<fp16, dim> smaller;
  smaller.set_budget(100);
  auto other_budget = made(smaller);
  CHECK_THAT(
      said([&] { loaded(other_budget, bytes); }),
      contains("tokens of the budget of a saved sequence is 1024; expected 100, as that of the cache that loads it"));
  auto other_element = made<snapkv<bf16, dim>>();
  CHECK_THAT(said([&] { loaded(other_element, bytes); }),
             contains("elements of a saved sequence is fp16; expected bf16"));
  auto other_shape = made<snapkv<fp16, dim>>({}, {1, 4, 1});
  CHECK_THAT(said([&] { loaded(other_shape, bytes); }), contains("q_heads of a saved sequence is 2; expected 4"));
  auto sliding = made<snapkv<fp16, dim>>({}, {1, 2, 1, 8, {true}});
  CHECK_THAT(said([&] { loaded(sliding, bytes); }), contains("of a recipe with fewer facts"));
  auto other_method = made<quest<fp16, dim>>();
  CHECK_THAT(said([&] { loaded(other_method, bytes); }), contains("saved sequence is"));
  bytes[8] = 9;
  CHECK_THAT(said([&] { loaded(source, bytes); }), contains("version of a saved sequence is 9; expected 2"));
  CHECK(source.next_position(0) == 20);
  CHECK_THROWS_AS(source.next_position(1), error);
}

TEST_CASE("a saved sequence keeps its own budget, and a sink's exception leaves the cache alone") {
  auto source = made<snapkv<fp16, dim>>(), target = made<snapkv<fp16, dim>>();
  const index_t id = written(source, 80, {{40, 0}, {}});
  CHECK(source.positions(0, id, 0).size() == 40);
  int calls = 0;
  CHECK_THROWS_AS(source.save(id,
                              [&](const void*, std::size_t) {
                                if (++calls == 3) throw std::runtime_error("full");
                              }),
                  std::runtime_error);
  const index_t copy = loaded(target, saved(source, id));
  CHECK(target.positions(0, copy, 0) == source.positions(0, id, 0));
  CHECK(target.plan(copy).retained == source.plan(id).retained);
  source.announce(id, 3);
  CHECK_THAT(said([&] { saved(source, id); }), contains("; expected "));
}

TEST_CASE("a search that has not ended begins anew where its sequence is loaded") {
  using namespace support::searched;
  using mosaic = mosaickv<fp32, support::searched::dim>;
  /// Holds tasks until they are performed by hand.
  struct waiting final : background {
    std::vector<std::shared_ptr<background_task>> tasks;
    void start(std::shared_ptr<background_task> task) override { tasks.push_back(std::move(task)); }
    void perform() {
      const std::atomic<bool> stopping{false};
      for (auto& task : tasks) task->perform(stopping), task->publish();
      tasks.clear();
    }
  };
  struct talk {
    cache<mosaic> held;
    std::shared_ptr<waiting> worker = std::make_shared<waiting>();
    talk()
        : held({layers, q_heads, kv_heads}, support::searched::searching<mosaic>(),
               std::make_shared<cpu::executor>(1)) {
      held.search_on(worker);
    }
    static std::vector<float> rows(index_t token, index_t layer, index_t side, index_t heads) {
      return support::searched::rows_of<float>(token, layer, side, heads, 0.12);
    }
    static rows_view<const float> given(const std::vector<float>& values, index_t heads) {
      return nhd_rows<const float>(values.data(), 1, heads, support::searched::dim);
    }
    std::vector<float> step(index_t id) {
      const index_t token = held.next_position(id);
      const batch now = held.prepare_step({id}, 1);
      std::vector<float> out(std::size_t(layers * q_heads * support::searched::dim));
      for (index_t layer = 0; layer < layers; ++layer) {
        const auto k = rows(token, layer, 0, kv_heads), v = rows(token, layer, 1, kv_heads),
                   q = rows(token, layer, 2, q_heads);
        held.decode(
            layer, now, given(q, q_heads), given(k, kv_heads), given(v, kv_heads),
            nhd_rows(out.data() + layer * q_heads * support::searched::dim, 1, q_heads, support::searched::dim));
      }
      return out;
    }
  } source, target;
  const index_t id = source.held.open();
  for (index_t t = 0; t < 128; ++t) {
    for (index_t layer = 0; layer < layers; ++layer) {
      const auto k = talk::rows(t, layer, 0, kv_heads), v = talk::rows(t, layer, 1, kv_heads),
                 q = talk::rows(t, layer, 2, q_heads);
      source.held.prefill(layer, id, talk::given(q, q_heads), talk::given(k, kv_heads), talk::given(v, kv_heads));
    }
  }
  source.held.end_prefill(id);
  for (int i = 0; i < 600 && source.worker->tasks.empty(); ++i) source.step(id);
  REQUIRE(source.worker->tasks.size() == 1);
  for (int i = 0; i < 5; ++i) source.step(id);
  const index_t copy = loaded(target.held, saved(source.held, id));
  REQUIRE(target.worker->tasks.size() == 1);
  CHECK(target.held.strategies(copy).searching);
  for (int i = 0; i < 5; ++i) CHECK(target.step(copy) == source.step(id));
  source.worker->perform(), target.worker->perform();
  for (int i = 0; i < 5; ++i) CHECK(target.step(copy) == source.step(id));
  CHECK(target.held.strategies(copy).searched == 1);
  CHECK(source.held.strategies(id).searched == 1);
  const index_t later = loaded(target.held, saved(source.held, id));
  for (int i = 0; i < 300; ++i) REQUIRE(target.step(later) == source.step(id));
}
