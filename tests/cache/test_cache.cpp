// What a cache is beside its recipe: sequences, copies, budgets, views, stored types.
#include "catch.hpp"

#include <limits>

#include <tessera/methods/full.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/tessera.hpp>

#include "support/kv_tensor.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

constexpr index_t tokens = 90, q_heads = 4, kv_heads = 2;

template <class E, int D, int Dv>
struct tensors {
  std::vector<E> q, k, v;
  explicit tensors(std::uint64_t seed) {
    support::rng random(seed);
    for (const float x : support::normals(random, std::size_t(tokens * q_heads * D))) q.push_back(E(x));
    for (const float x : support::normals(random, std::size_t(tokens * kv_heads * D))) k.push_back(E(x));
    for (const float x : support::normals(random, std::size_t(tokens * kv_heads * Dv))) v.push_back(E(x));
  }
  auto queries(index_t first, index_t count) const {
    return nhd_rows<const E>(q.data() + first * q_heads * D, count, q_heads, D);
  }
  auto keys(index_t first, index_t count) const {
    return nhd_rows<const E>(k.data() + first * kv_heads * D, count, kv_heads, D);
  }
  auto values(index_t first, index_t count) const {
    return nhd_rows<const E>(v.data() + first * kv_heads * Dv, count, kv_heads, Dv);
  }
};

using small = snapkv<fp32, 64>;
using inputs = tensors<float, 64, 64>;

cache<small> with_budget(index_t budget) {
  small recipe;
  recipe.retain.scorer.window = 8;
  recipe.set_budget(budget);
  return {{1, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(1)};
}

void prompt(cache<small>& held, index_t id, const inputs& data, index_t first, index_t count) {
  held.prefill(0, id, data.queries(first, count), data.keys(first, count), data.values(first, count));
  held.end_prefill(id);
}

std::vector<float> step(cache<small>& held, index_t id, const inputs& data, index_t at) {
  std::vector<float> out(std::size_t(q_heads * 64));
  held.decode(0, held.prepare_step({id}, 1), data.queries(at, 1), data.keys(at, 1), data.values(at, 1),
              nhd_rows(out.data(), 1, q_heads, 64));
  return out;
}

}  // namespace

TEST_CASE("a cache keeps sequences apart and uses ids of closed ones again") {
  const inputs one(171), two(172);
  auto held = with_budget(20), alone = with_budget(20);
  const index_t a = held.open(), b = held.open();
  REQUIRE(a != b);
  prompt(held, a, one, 0, 60);
  prompt(held, b, two, 0, 50);
  REQUIRE(alone.open() == a);
  prompt(alone, a, one, 0, 60);
  CHECK(support::same_bits(step(held, a, one, 60), step(alone, a, one, 60)));
  CHECK(held.next_position(b) == 50);
  held.close(a);
  CHECK(held.next_position(b) == 50);
  CHECK(held.open() == a);
  CHECK(held.next_position(a) == 0);
  CHECK(held.length(0, a, 0) == 0);
  CHECK(held.length(0, b, 1) == 20);
}

TEST_CASE("a copy of a cache goes its own way, also from the middle of a prompt") {
  const inputs data(173);
  auto held = with_budget(20);
  const index_t id = held.open();
  held.prefill(0, id, data.queries(0, 40), data.keys(0, 40), data.values(0, 40));
  auto copy = held;
  for (auto* each : {&held, &copy}) {
    each->prefill(0, id, data.queries(40, 20), data.keys(40, 20), data.values(40, 20));
    each->end_prefill(id);
  }
  CHECK(copy.positions(0, id, 1) == held.positions(0, id, 1));
  const auto expected = step(copy, id, data, 60);
  copy.close(id);
  CHECK(support::same_bits(step(held, id, data, 60), expected));
  copy = held;
  CHECK(support::same_bits(step(copy, id, data, 61), step(held, id, data, 61)));
  const auto moved = std::move(copy);
  CHECK(moved.next_position(id) == 62);
}

TEST_CASE("a changed budget counts from the next time that the schedule retains") {
  const inputs data(174);
  auto held = with_budget(30);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  CHECK(held.length(0, id, 0) == 30);
  held.set_budget(12);
  CHECK(held.recipe().budget() == 12);
  CHECK(held.length(0, id, 0) == 30);
  step(held, id, data, 60);
  CHECK(held.length(0, id, 0) == 31);
  prompt(held, id, data, 61, 3);
  CHECK(held.length(0, id, 0) == 12);
}

TEST_CASE("attended positions are written down only while tracing") {
  const inputs data(175);
  auto held = with_budget(20);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  step(held, id, data, 60);
  CHECK(held.attended(0, id).empty());
  held.trace_attended(true);
  step(held, id, data, 61);
  REQUIRE(held.attended(0, id).size() == std::size_t(kv_heads));
  CHECK(held.attended(0, id)[1] == held.positions(0, id, 1));
  CHECK(held.attended(0, id)[1].back() == 61);
}

TEST_CASE("an engine's own attention reads a cache's view") {
  const inputs data(176);
  auto held = with_budget(20);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  const auto out = step(held, id, data, 60);
  const auto view = held.view(0, id);
  std::vector<float> own(out.size());
  const index_t first = 60;
  cpu::executor workers(1);
  cpu::decode_workspace workspace;
  cpu::decode_attention(view, cpu::query_rows<float>{data.queries(60, 1), &first}, logit_rule{}, nullptr,
                        cpu::attention_output{nhd_rows(own.data(), 1, q_heads, 64), {}}, workspace, workers);
  CHECK(support::same_bits(own, out));
  CHECK(view.position(0, 1, 20) == 60);
}

TEST_CASE("16-bit tensors with K and V dims that differ go in as they are and are attended as stored") {
  const tensors<bf16, 192, 128> data(177);
  cache<full<bf16, 192, 128>> held({1, q_heads, kv_heads}, {}, std::make_shared<cpu::executor>(1));
  CHECK(held.full_bytes(10) == 2 * 10 * 640);
  const index_t id = held.open();
  held.prefill(0, id, data.queries(0, 60), data.keys(0, 60), data.values(0, 60));
  held.end_prefill(id);
  std::vector<float> out(std::size_t(q_heads * 128)), lse(q_heads);
  held.decode(0, held.prepare_step({id}, 1), data.queries(60, 1), data.keys(60, 1), data.values(60, 1),
              nhd_rows(out.data(), 1, q_heads, 128), nhd_rows(lse.data(), 1, q_heads, 1));
  const std::vector<float> q(data.q.begin(), data.q.end()), k(data.k.begin(), data.k.end()),
      v(data.v.begin(), data.v.end());
  for (index_t h = 0; h < q_heads; ++h) {
    std::vector<const float*> keys, values;
    std::vector<index_t> positions;
    for (index_t t = 0; t <= 60; ++t) {
      keys.push_back(k.data() + (t * kv_heads + h / 2) * 192);
      values.push_back(v.data() + (t * kv_heads + h / 2) * 128);
      positions.push_back(t);
    }
    const auto expected =
        support::oracle::attend(q.data() + (60 * q_heads + h) * 192, 60, keys, values, positions, 192, 128);
    CHECK(support::row_error(out.data() + h * 128, expected.out) < 1e-5);
    CHECK(support::number_error(lse[std::size_t(h)], expected.lse) < 1e-5);
  }
}

TEST_CASE("a sequence may begin with a decode step") {
  const inputs data(178);
  auto held = with_budget(20);
  const index_t id = held.open();
  const auto out = step(held, id, data, 0);
  for (index_t h = 0; h < q_heads; ++h) {
    CHECK(std::equal(out.begin() + h * 64, out.begin() + (h + 1) * 64, data.v.begin() + h / 2 * 64));
  }
  CHECK(held.next_position(id) == 1);
}

TEST_CASE("a step of no tokens, and one that a prompt has overtaken, are refused, and nothing changes") {
  const inputs data(180);
  auto held = with_budget(20);
  const index_t id = held.open();
  const batch early = held.prepare_step({id}, 1);
  prompt(held, id, data, 0, 60);
  std::vector<float> out(std::size_t(q_heads * 64));
  const auto decode = [&](const batch& now, index_t tokens) {
    held.decode(0, now, data.queries(60, tokens), data.keys(60, tokens), data.values(60, tokens),
                nhd_rows(out.data(), tokens, q_heads, 64));
  };
  CHECK_THROWS_WITH(decode(early, 0), contains("tokens of a decode step is 0"));
  const batch late = held.prepare_step({id}, 1);
  held.prefill(0, id, data.queries(60, 1), data.keys(60, 1), data.values(60, 1));
  CHECK_THROWS_WITH(decode(late, 1), contains("tokens since the prompt began is 1; expected 0"));
  CHECK(held.next_position(id) == 61);
  CHECK(held.length(0, id, 0) == 21);
}

TEST_CASE("a step is taken once: its layers may not go on without another prepare_step") {
  const inputs data(182);
  auto held = with_budget(20);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  std::vector<float> out(std::size_t(q_heads * 64));
  batch now = held.prepare_step({id}, 1);
  const auto decode = [&] {
    held.decode(0, now, data.queries(60, 1), data.keys(60, 1), data.values(60, 1),
                nhd_rows(out.data(), 1, q_heads, 64));
  };
  CHECK_NOTHROW(decode());
  CHECK_THROWS_WITH(decode(),
                    contains("tokens before the step is 61; expected those that prepare_step saw, which are 60; "
                             "call prepare_step before every step"));
  CHECK(held.next_position(id) == 61);
  now = held.prepare_step({id}, 1);
  CHECK_NOTHROW(decode());
}

TEST_CASE("a step of a sequence that has been closed is refused, and so is one that another has followed") {
  const inputs data(184);
  auto held = with_budget(20);
  std::vector<float> out(std::size_t(q_heads * 64));
  const auto decode = [&](const batch& now) {
    held.decode(0, now, data.queries(60, 1), data.keys(60, 1), data.values(60, 1),
                nhd_rows(out.data(), 1, q_heads, 64));
  };
  index_t id = held.open();
  prompt(held, id, data, 0, 60);
  const batch early = held.prepare_step({id}, 1);
  held.close(id);
  REQUIRE(held.open() == id);
  prompt(held, id, data, 0, 60);
  const auto refused = contains("step of sequence 0 is 1; expected the one that prepare_step returned last for it");
  CHECK_THROWS_WITH(decode(early), refused);
  const batch late = held.prepare_step({id}, 1), last = held.prepare_step({id}, 1);
  CHECK_THROWS_WITH(decode(early), refused);
  CHECK_THROWS_WITH(decode(late), contains("step of sequence 0 is 2"));
  CHECK_THROWS_WITH(decode(batch{{id}, 1}), contains("step of sequence 0 is 0"));
  CHECK(held.next_position(id) == 60);
  CHECK_NOTHROW(decode(last));
  CHECK(held.next_position(id) == 61);
}

TEST_CASE("the position behind a sequence's last token is below 2^31") {
  constexpr index_t most = std::numeric_limits<index_t>::max();
  const inputs data(185);
  std::vector<float> out(std::size_t(2 * q_heads * 64));
  const small recipe = with_budget(20).recipe();
  conversations<small> known({1, q_heads, kv_heads}, recipe);
  const index_t id = known.open(recipe, {});
  known.took_chunk({0, id}, most - 5);  // nobody waits for so many
  const auto chunk = [&](index_t tokens) {
    known.check_chunk(recipe, {0, id}, data.queries(0, tokens), data.keys(0, tokens), data.values(0, tokens));
  };
  const auto refused = contains("tokens of a sequence is 2147483648; expected at most 2147483647; close the sequence");
  CHECK_THROWS_WITH(chunk(6), refused);
  CHECK_NOTHROW(chunk(5));
  known.took_chunk({0, id}, 4);
  CHECK_THROWS_WITH(known.check_rereading({0, id}, 0, 9, data.queries(0, 2), data.keys(0, 2), data.values(0, 2),
                                          nhd_rows(out.data(), 2, q_heads, 64)),
                    refused);
  known.end_prompt(id, known.sequence(id).policies);
  CHECK_NOTHROW(known.plan_step(recipe, batch{{id}, 1}, 8));
  CHECK_THROWS_WITH(known.plan_step(recipe, batch{{id}, 2}, 8), refused);
}

TEST_CASE("a step whose rows are of other sequences is refused by what is wrong") {
  const inputs data(183);
  auto held = with_budget(20);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  std::vector<float> out(std::size_t(q_heads * 64));
  const batch now = held.prepare_step({id}, 1);
  auto keys = data.keys(60, 1);
  keys.sequences = 2;
  CHECK_THROWS_WITH(
      held.decode(0, now, data.queries(60, 1), keys, data.values(60, 1), nhd_rows(out.data(), 1, q_heads, 64)),
      contains("sequences of the batch is 2; expected as many as ids, which are 1"));
  auto queries = data.queries(60, 1);
  queries.data = nullptr;
  held.prefill(0, id, data.queries(60, 1), data.keys(60, 1), data.values(60, 1));
  CHECK_THROWS_WITH(held.prefill_attention(0, id, queries, nhd_rows(out.data(), 1, q_heads, 64)),
                    contains("memory of q is null; expected memory behind it"));
}

TEST_CASE("a cache without an executor is refused") {
  CHECK_THROWS_WITH(cache<small>({1, q_heads, kv_heads}, small{}, nullptr),
                    contains("executor is null; expected a pool of threads"));
}

TEST_CASE("the length of a kv_head that the model does not have is refused") {
  const inputs data(181);
  auto held = with_budget(20);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  CHECK(held.length(0, id, kv_heads - 1) == 20);
  for (const index_t head : {index_t(-1), kv_heads, index_t(1) << 30}) {
    CHECK_THROWS_WITH(held.length(0, id, head), contains("kv_head is " + std::to_string(head) + "; expected 0 to 1"));
  }
}

TEST_CASE("a traced choice says what competed, with its scores, and the best of it stays") {
  const inputs data(182);
  auto held = with_budget(20);
  held.trace_ranked(true);
  const index_t id = held.open();
  prompt(held, id, data, 0, 60);
  for (index_t head = 0; head < kv_heads; ++head) {
    const auto& positions = held.ranked(0, id).positions[std::size_t(head)];
    const auto& scores = held.ranked(0, id).scores[std::size_t(head)];
    REQUIRE(positions.size() == 52);  // all but the window of 8
    REQUIRE(scores.size() == 52);
    const auto kept = held.positions(0, id, head);
    float worst_kept = infinity, best_dropped = -infinity;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      CHECK(positions[i] == index_t(i));
      const bool stays = std::binary_search(kept.begin(), kept.end(), positions[i]);
      (stays ? worst_kept : best_dropped) = stays ? std::min(worst_kept, scores[i]) : std::max(best_dropped, scores[i]);
    }
    CHECK(worst_kept >= best_dropped);
    CHECK(worst_kept > 0);
  }
  auto roomy = with_budget(64);
  roomy.trace_ranked(true);
  REQUIRE(roomy.open() == id);
  prompt(roomy, id, data, 0, 60);
  CHECK(roomy.ranked(0, id).scores[0].empty());  // everything stays: nothing was ranked
}
