#include "catch.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <tessera/backend/cpu/any_cache.hpp>
#include <tessera/cache.hpp>
#include <tessera/methods/rocketkv.hpp>
#include <tessera/methods/snapkv.hpp>

#include "cache/callers/gated_method.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {

constexpr int dim = 64;
const model_shape shape{2, 4, 2};

any_cache_request asked(std::optional<index_t> budget, host_vector<named_setting> settings) {
  any_cache_request request;
  request.shape = shape;
  request.budget = budget;
  request.settings = std::move(settings);
  return request;
}

}  // namespace

TEST_CASE("a cache by name gives the bits of the cache itself") {
  const auto workers = std::make_shared<cpu::executor>(1);
  snapkv<fp16, dim> recipe;
  recipe.set_budget(24);
  recipe.retain.scorer.window = 8;
  cache<snapkv<fp16, dim>> own(shape, recipe, workers);
  const std::unique_ptr<any_cache> named =
      std::make_unique<cpu::any_cache_of<snapkv<fp16, dim>>>(asked(24, {{"window", "8"}}), workers);
  CHECK(named->facts().drops_by_layer);
  CHECK_FALSE(named->facts().needs_segments);
  CHECK(named->bound(60, 5) == own.bound(60, 5));

  support::rng random(31);
  std::vector<float> rows(60 * 4 * dim);
  for (float& value : rows) value = float(random.between(-100, 100)) / 50;
  const auto pass = [&](const host_vector<batch_item>& items, index_t tokens) {
    const auto q = nhd_rows<const float>(rows.data(), tokens, 4, dim),
               k = nhd_rows<const float>(rows.data() + 7, tokens, 2, dim);
    std::vector<float> a(std::size_t(tokens) * 4 * dim), b = a;
    const mixed_batch first = own.prepare(items), second = named->prepare(items);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      own.process(layer, first, q, k, k, nhd_rows(a.data(), tokens, 4, dim));
      named->process(layer, second, q, k, k, nhd_rows(b.data(), tokens, 4, dim));
      CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    }
  };
  const index_t id = own.open(), other = own.open();
  REQUIRE(named->open() == id);
  REQUIRE(named->open() == other);
  pass({{id, 40, true}, {other, 20, true}}, 60);
  own.end_prefill(id), named->end_prefill(id);
  pass({{id, 2, false}, {other, 10, true}}, 12);
  CHECK(named->positions(1, id, 0) == own.positions(1, id, 0));
  CHECK(named->positions(1, id, 0).size() == 26);
  CHECK(named->bytes(id) == own.bytes(id));
  CHECK(named->bytes_read(id) == own.bytes_read(id));
  CHECK(named->full_bytes(42) == own.full_bytes(42));
  named->truncate(id, 41);
  CHECK(named->next_position(id) == 41);
  CHECK_THROWS_WITH(named->truncate(id, 3), contains("; expected "));
  const index_t fork = named->fork(id);
  named->close(id);
  CHECK(named->next_position(fork) == 41);
  CHECK(named->settled(fork) <= 41);
}

TEST_CASE("prompts, steps, copies and traces by name are those of the cache itself") {
  const auto workers = std::make_shared<cpu::executor>(1);
  using method = snapkv<fp16, dim>;
  method recipe;
  recipe.set_budget(40);
  cache<method> own(shape, recipe, workers);
  const std::unique_ptr<any_cache> named =
      std::make_unique<cpu::any_cache_of<method, fp16>>(shape, recipe, workers, nullptr);
  const any_cache_facts& facts = named->facts();
  CHECK((facts.k_dim == dim && facts.v_dim == dim && facts.input == element_kind::fp16));
  CHECK((facts.output == element_kind::fp32 && facts.chunk == 0 && facts.saves && !facts.packs && !facts.rereads));
  own.trace_attended(true), own.trace_ranked(true), named->trace_attended(true), named->trace_ranked(true);

  support::rng random(32);
  std::vector<fp16> rows(100 * 4 * dim);
  for (fp16& value : rows) value = fp16(float(random.between(-100, 100)) / 50);
  const index_t id = own.open();
  REQUIRE(named->open() == id);
  std::vector<float> a(100 * 4 * dim), b = a, lse_a(400), lse_b = lse_a;
  const auto same = [&] {
    CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    CHECK(lse_a == lse_b);
  };
  const auto q = nhd_rows<const fp16>(rows.data(), 100, 4, dim), k = nhd_rows<const fp16>(rows.data() + 9, 100, 2, dim);
  named->announce(id, 100), own.announce(id, 100), named->reserve(id, 100);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    own.prefill(layer, id, q, k, k), named->prefill(layer, id, q, k, k);
    own.prefill_attention(layer, id, q, nhd_rows(a.data(), 100, 4, dim), nhd_rows(lse_a.data(), 100, 4, 1));
    named->prefill_attention(layer, id, q, nhd_rows(b.data(), 100, 4, dim), nhd_rows(lse_b.data(), 100, 4, 1));
    same();
  }
  own.end_layer(0, id), named->end_layer(0, id);
  own.end_prefill(id), named->end_prefill(id);
  CHECK(named->ranked(1, id).scores == own.ranked(1, id).scores);
  CHECK(named->ranked(1, id).positions[0].size() > 0);
  own.set_budget(44), named->set_budget(44);
  const std::unique_ptr<any_cache> copy = named->clone();
  const auto step_q = nhd_rows<const fp16>(rows.data() + 5, 3, 4, dim),
             step_k = nhd_rows<const fp16>(rows.data() + 1, 3, 2, dim);
  const auto step_on = [&](any_cache& held) {
    const batch step = held.prepare_step({id}, 3);
    held.begin_step(step);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      held.decode(layer, step, step_q, step_k, step_k, nhd_rows(b.data(), 3, 4, dim), nhd_rows(lse_b.data(), 3, 4, 1));
      held.attend(layer, step, step_q, nhd_rows(b.data() + 12 * dim, 3, 4, dim));
    }
  };
  const batch step = own.prepare_step({id}, 3);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    own.decode(layer, step, step_q, step_k, step_k, nhd_rows(a.data(), 3, 4, dim), nhd_rows(lse_a.data(), 3, 4, 1));
    own.attend(layer, step, step_q, nhd_rows(a.data() + 12 * dim, 3, 4, dim));
  }
  step_on(*named), same();
  CHECK(named->attended(1, id) == own.attended(1, id));
  CHECK(copy->next_position(id) == 100);
  b.assign(b.size(), 0);
  std::copy(a.begin() + 24 * dim, a.end(), b.begin() + 24 * dim);
  step_on(*copy), same();
  CHECK(named->queries_needed(100) == own.recipe().queries_needed(100));
  CHECK(named->available() == own.available());
  CHECK((named->pages(id).empty() && named->step_positions() == nullptr));

  const std::vector<float> wrong(400 * dim);
  CHECK_THROWS_WITH(named->prefill(0, id, nhd_rows<const float>(wrong.data(), 1, 4, dim), step_k, step_k),
                    contains("element type of rows is fp32; expected fp16"));
  CHECK_THROWS_WITH(named->reread(0, id, 0, 1, q, k, k, nhd_rows(b.data(), 100, 4, dim)),
                    contains("rereads no prompts"));
  CHECK_THROWS_WITH(named->unpacked(0, id), contains("expected packed rows"));
  CHECK_THROWS_WITH(named->pages(7), contains("sequence"));
  CHECK(named->next_position(id) == 103);
}

TEST_CASE("parameters come as text: numbers, words, and a split that adapts") {
  const auto recipe =
      recipe_of<rocketkv<fp16, dim>>(asked(100, {{"window", "16"}, {"pool_kind", "average"}, {"split", "0.25"}}));
  CHECK(recipe.retain.scorer.window == 16);
  CHECK(recipe.budget() == 100);
  CHECK(recipe_of<rocketkv<fp16, dim>>(asked({}, {{"split", "adaptive"}})).retain.scorer.window ==
        rocketkv<fp16, dim>{}.retain.scorer.window);
  const auto refuses = [](const char* name, const char* value, const char* sentence) {
    CHECK_THROWS_WITH((recipe_of<rocketkv<fp16, dim>>(asked({}, {{name, value}}))), contains(sentence));
  };
  refuses("windows", "16", "parameter is 'windows'; expected window, pool, pool_kind, ");
  refuses("window", "16 tokens", "window is '16 tokens'; expected a number, 1 to ");
  refuses("window", "0", "window is 0; expected 1 to ");
  refuses("pool_kind", "median", "pool_kind is 'median'; expected ");
  refuses("split", "half", "split is 'half'; expected a number");
}

TEST_CASE("a cache by name takes the scores that an engine gives, and others refuse them in a sentence") {
  const auto workers = std::make_shared<cpu::executor>(1);
  using method = gated::at_the_end<fp32>;
  method recipe;
  recipe.set_budget(20);
  const model_shape model{gated::layers, gated::q_heads, gated::kv_heads};
  cache<method> own(model, recipe, workers);
  any_cache_request request;
  request.shape = model;
  request.budget = 20;
  const std::unique_ptr<any_cache> named = std::make_unique<cpu::any_cache_of<method>>(request, workers);
  CHECK(named->facts().takes_scores);
  const std::vector<float> rows(std::size_t(50 * gated::kv_heads * dim), 0.5f);
  const auto k = nhd_rows<const float>(rows.data(), 50, gated::kv_heads, dim);
  const auto none = nhd_rows<const float>(rows.data(), 0, gated::q_heads, dim);
  REQUIRE(own.open() == named->open());
  for (index_t layer = 0; layer < gated::layers; ++layer) {
    own.prefill(layer, 0, none, k, k), named->prefill(layer, 0, none, k, k);
    for (const index_t first : {0, 30}) {
      const auto scores = gated::scores_of(layer, first, first == 0 ? 30 : 20);
      own.set_scores(layer, 0, first, first == 0 ? 30 : 20, scores.data());
      if (first == 0 || layer == 0) named->set_scores(layer, 0, first, first == 0 ? 30 : 20, scores.data());
    }
  }
  CHECK_THROWS_WITH(named->end_prefill(0), contains("tokens with scores in layer 1 is 30; expected all, which are 50"));
  named->set_scores(1, 0, 30, 20, gated::scores_of(1, 30, 20).data());
  own.end_prefill(0), named->end_prefill(0);
  for (index_t layer = 0; layer < gated::layers; ++layer) {
    for (index_t head = 0; head < gated::kv_heads; ++head) {
      CHECK(named->positions(layer, 0, head).size() == 20);
      CHECK(named->positions(layer, 0, head) == own.positions(layer, 0, head));
    }
  }
  const std::unique_ptr<any_cache> other =
      std::make_unique<cpu::any_cache_of<snapkv<fp16, dim>>>(asked(40, {}), workers);
  CHECK_FALSE(other->facts().takes_scores);
  other->open();
  CHECK_THROWS_WITH(other->set_scores(0, 0, 0, 1, rows.data()), contains("none: this method computes its own"));
}
