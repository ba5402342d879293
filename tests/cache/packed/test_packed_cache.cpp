// Caches of packed rows: what becomes a segment when, what it takes, and what bad input leaves behind.
#include "catch.hpp"

#include <numeric>

#include <tessera/cache.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/think.hpp>

#include "backend/cpu/read/packed_oracle.hpp"
#include "packed_conversation.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using namespace packed_conversation;
namespace exact = support::packed_oracle;

namespace {

/// Bytes of an uncompressed cache of as many tokens over those that are allocated.
double times_smaller(index_t group, packed_element element) {
  mosaickv<bf16, 128> recipe;
  recipe.layout.rows.key.group = recipe.layout.rows.value.group = group;
  recipe.layout.rows.element = element;
  cache<mosaickv<bf16, 128>> held({1, 1, 1}, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = held.open(), chunk = 4096, tokens = 65536;
  support::rng random(406);
  for (index_t first = 0; first < tokens; first += chunk) {
    const auto rows = support::normals(random, std::size_t(chunk * 128));
    const auto given = nhd_rows<const float>(rows.data(), chunk, 1, 128);
    held.prefill(0, id, rows_view<const float>{nullptr, 0, 0, 0, 1, 0, 1, 128}, given, given);
  }
  held.end_prefill(id);
  return double(held.full_bytes(tokens)) / double(held.bytes(id));
}

}  // namespace

TEST_CASE("steps answer as attention in double over what is unpacked and rotated back, turn after turn") {
  mosaic recipe;
  recipe.layout.rows.segment = 96;
  recipe.layout.rows.key.group = recipe.layout.rows.value.group = 2;
  recipe.set_budget(48);
  conversation<mosaic> now{recipe};
  index_t compared = 0;
  for (const index_t prompt : {250, 20, 70}) {
    now.prompt(prompt);
    for (const index_t tokens : {1, 8, 3, 1}) {
      auto before = now.held;
      now.step(tokens);
      const auto view = now.held.view(0, now.id), old = before.view(0, now.id);
      const index_t n = now.held.next_position(now.id), packed = old.packed[0];
      std::vector<index_t> positions(static_cast<std::size_t>(n));
      std::iota(positions.begin(), positions.end(), 0);
      for (index_t h = 0; h < kv_heads; ++h) {
        const auto attended = now.held.attended(0, now.id)[std::size_t(h)];
        std::vector<const float*> asked;
        for (index_t row = 0; row < tokens * 2; ++row) {
          asked.push_back(now.q.data() + ((row / 2) * q_heads + h * 2 + row % 2) * 64);
        }
        bool close = false;
        auto expected = exact::chosen_blocks(exact::blocks_of(old, h, asked, true), 48, close);
        for (index_t slot = packed; slot < n; ++slot) expected.push_back(slot);
        if (!close) REQUIRE(attended == expected);
        REQUIRE(index_t(attended.size()) == 48 + n - packed);
        if (view.packed[h] != packed) continue;  // the step's end has packed some of what it read whole
        const auto held = exact::tokens_of(view, h);
        for (index_t row = 0; row < tokens * 2; ++row) {
          const index_t token = row / 2, q_head = h * 2 + row % 2;
          const auto answer =
              exact::attend(asked[std::size_t(row)], n - tokens + token, held, attended, positions, {}, q_head);
          REQUIRE(support::row_error(now.out.data() + (token * q_heads + q_head) * 64, answer.out) < 1e-5);
          REQUIRE(support::number_error(now.lse[std::size_t(token * q_heads + q_head)], answer.lse) < 1e-5);
          ++compared;
        }
      }
    }
  }
  CHECK(compared > 80);
}

TEST_CASE("a copy of a cache goes its own way") {
  conversation<mosaic> now{of_short_segments(64)};
  now.prompt(100);
  auto copy = now;
  const auto bytes = now.held.bytes(now.id);
  for (index_t i = 0; i < 40; ++i) copy.step(1);
  CHECK(copy.parts() == list{128, 12});
  CHECK(now.parts() == list{96, 4});
  CHECK(now.held.bytes(now.id) == bytes);
  for (index_t i = 0; i < 40; ++i) now.step(1);
  CHECK(support::same_bits(now.out, copy.out));
  now.held.close(now.id);
  copy.step(1);
}

TEST_CASE("a fork shares finished segments, and what joins the last one makes it its own") {
  mosaickv<float, 64> recipe;
  recipe.layout.rows.segment = 96;
  recipe.set_budget(64);
  conversation<mosaickv<float, 64>> one(recipe);
  one.prompt(96 * 3 + 3);
  const auto segments = [&](index_t id) { return *one.held.view(0, id).segments; };
  const auto before = segments(one.id);
  const index_t origin = one.id, fork = one.held.fork(origin);
  REQUIRE(before.size() == 3);
  CHECK(segments(fork) == before);
  one.id = fork;
  for (int i = 0; i < 40; ++i) one.step(1);  // a tail joins
  CHECK(segments(origin) == before);
  const auto after = segments(fork);
  REQUIRE(after.size() == 3);
  CHECK((after[0] == before[0] && after[1] == before[1] && after[2] != before[2]));
  CHECK((after[2]->lengths[0] == 128 && before[2]->lengths[0] == 96));
  one.held.close(origin);
  CHECK(one.held.next_position(fork) == 96 * 3 + 3 + 40);
}

TEST_CASE("packed rows are as much smaller as the paper has it, everything counted") {
  CHECK(times_smaller(1, packed_element::same) >= 3.0);
  CHECK(times_smaller(4, packed_element::same) >= 3.5);
  CHECK(times_smaller(1, packed_element::int4) >= 7.0);
}

TEST_CASE("strategies that make no sense are refused by a sentence") {
  const auto with = [](auto change) {
    mosaic recipe;
    change(recipe);
    return refused(recipe);
  };
  const auto channels = [](float share) {
    return [share](mosaic& r) { r.layout.rows.key.channels = r.layout.rows.value.channels = share; };
  };
  CHECK_THAT(with(channels(0.001f)), contains("channels is 0 elements; expected at least 1"));
  CHECK_THAT(with(channels(0.9f)),
             contains("channels is 58 elements; expected at most what truncate leaves, which is 48"));
  CHECK_THAT(with([](mosaic& r) {
               r.layout.rows.key.channels = r.layout.rows.value.channels = 0.27f;
               r.layout.rows.key.group = r.layout.rows.value.group = 4;
             }),
             contains("channels is 17 elements; expected a multiple of the group, which is 4"));
  CHECK_THAT(with([](mosaic& r) { r.layout.rows.key.group = 3; }), contains("group is 3; expected 1, 2 or 4"));
  CHECK_THAT(with([](mosaic& r) { r.retrieve.selector.block = 12; }),
             contains("block is 12; expected a divisor of the tail, which is 32"));
  CHECK_THAT(with([](mosaic& r) { r.set_budget(15); }), contains("budget is 15; expected at least two blocks"));
  CHECK_THAT(with([](mosaic& r) { r.layout.rows.basis.truncate = 1.5f; }), contains("truncate is 1.5"));
  CHECK(with([](mosaic&) {}) == "nothing was thrown");
}

TEST_CASE("a second moment that is no number is refused, and the cache is as it was") {
  conversation<mosaic> now{of_short_segments(64)};
  now.prompt(64);
  const auto bytes = now.held.bytes(now.id);
  CHECK(now.parts() == list{64, 0});
  conversation<mosaic> poisoned{of_short_segments(64)};
  CHECK_THROWS_WITH(poisoned.prompt(64, std::numeric_limits<float>::quiet_NaN()),
                    contains("the second moment of keys of layer 0, kv_head"));
  CHECK(poisoned.parts() == list{64});
  CHECK_THROWS_AS(poisoned.held.end_prefill(poisoned.id), error);
  poisoned.held.close(poisoned.id);
  poisoned.id = poisoned.held.open();
  poisoned.prompt(64);
  CHECK(poisoned.parts() == list{64, 0});
  CHECK(poisoned.held.bytes(poisoned.id) == bytes);
}

namespace {
/// Prompt and one step of `recipe` over the same rows, whose last prompt query and second query head of the step are `spoilt`.
template <class Recipe>
conversation<Recipe> spoilt_by(const Recipe& recipe, float spoilt) {
  using T = typename Recipe::layout_type::element_type;
  constexpr int dim = Recipe::layout_type::k_dim;
  conversation<Recipe> now(recipe);
  const auto rows = [&](index_t tokens, index_t heads) {
    std::vector<T> made;
    for (const float x : support::normals(now.random, std::size_t(tokens * heads * dim))) made.push_back(T(x));
    return made;
  };
  for (const index_t tokens : {160, 1}) {
    const auto k = rows(tokens, kv_heads), v = rows(tokens, kv_heads);
    auto queries = rows(tokens, q_heads);
    const std::size_t first = queries.size() - std::size_t((tokens > 1 ? q_heads : q_heads - 1) * dim);
    std::fill_n(queries.begin() + std::ptrdiff_t(first), dim, T(spoilt));
    const auto given = [&](const std::vector<T>& of, index_t heads) {
      return nhd_rows<const T>(of.data(), tokens, heads, dim);
    };
    now.out.assign(std::size_t(q_heads * dim), 7.0f);
    if (tokens > 1) {
      now.held.prefill(0, now.id, given(queries, q_heads), given(k, kv_heads), given(v, kv_heads));
      now.held.end_prefill(now.id);
    } else {
      now.held.decode(0, now.held.prepare_step({now.id}, 1), given(queries, q_heads), given(k, kv_heads),
                      given(v, kv_heads), nhd_rows(now.out.data(), 1, q_heads, dim));
    }
  }
  return now;
}
}  // namespace

TEST_CASE("a query that is no number does not choose for others") {
  mosaickv<float, 64> mosaic;
  mosaic.layout.rows.segment = 64;
  mosaic.retrieve.selector.block = 8;
  mosaic.set_budget(40);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto whole = spoilt_by(mosaic, 0.0f);
  for (const float spoilt : {nan, infinity, -infinity}) {
    const auto other = spoilt_by(mosaic, spoilt);
    CHECK(other.held.attended(0, other.id) == whole.held.attended(0, whole.id));
    CHECK(support::same_bits(std::vector<float>(other.out.begin(), other.out.begin() + 64),
                             std::vector<float>(whole.out.begin(), whole.out.begin() + 64)));
  }
  const auto all = spoilt_by(think<float, 64>(), 0.0f), some = spoilt_by(think<float, 64>(), nan);
  CHECK(support::same_bits(std::vector<float>(some.out.begin(), some.out.begin() + 64),
                           std::vector<float>(all.out.begin(), all.out.begin() + 64)));
}

TEST_CASE("a step may have more tokens than the budget has rows") {
  mosaickv<float, 64> mosaic;
  mosaic.layout.rows.segment = 64;
  mosaic.retrieve.selector.block = 2;
  mosaic.set_budget(4);
  conversation<mosaickv<float, 64>> now(mosaic);
  now.prompt(128);
  now.step(8);
  CHECK(now.held.attended(0, now.id)[0].size() == 4 + 8);
}

TEST_CASE("fp16 holds keys whose norm it does not") {
  using mosaic = mosaickv<fp16, 64>;
  mosaic recipe;
  recipe.layout.rows.segment = 64;
  cache<mosaic> held({1, 1, 1}, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = held.open();
  const std::vector<fp16> k(64 * 64, fp16(9000.0f)), one(64 * 64, fp16(1.0f)), q(64 * 64, fp16(1e-3f));
  const auto given = [](const std::vector<fp16>& of, index_t tokens) {
    return nhd_rows<const fp16>(of.data(), tokens, 1, 64);
  };
  held.prefill(0, id, given(q, 64), given(k, 64), given(one, 64));
  held.end_prefill(id);
  std::vector<float> out(64);
  held.decode(0, held.prepare_step({id}, 1), given(q, 1), given(k, 1), given(one, 1), nhd_rows(out.data(), 1, 1, 64));
  for (const float x : out) CHECK(std::abs(x - 1.0f) < 0.01f);
}
