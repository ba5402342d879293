// Classes of heads: which stream, by hand and against sorting; and DuoAttention's cache over random conversations.
#include "catch.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include <tessera/cache.hpp>
#include <tessera/methods/duo_attention.hpp>

#include "laws/policies.hpp"
#include "support/random.hpp"
#include "support/scores.hpp"

using namespace tessera;
using support::rng;
using support::scaled;

namespace {

constexpr int dim = 64;
using method = duo_attention<fp32, dim>;
static_assert(runs_on_devices<method>);

/// The heads that stream, by sorting all of them.
std::vector<bool> sorted_classes(const std::vector<double>& gates, double streaming) {
  std::vector<std::size_t> order(gates.size());
  std::iota(order.begin(), order.end(), std::size_t(0));
  std::reverse(order.begin(), order.end());  // of equal gates the later heads stream
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return gates[a] < gates[b]; });
  order.resize(std::size_t(std::lround(streaming * double(gates.size()))));
  std::vector<bool> result(gates.size(), false);
  for (const std::size_t head : order) result[head] = true;
  return result;
}

}  // namespace

TEST_CASE("the heads with the smallest gates stream, of equal ones the later") {
  const std::vector<double> gates{0.1, 0.5, 0.5, 0.9, 0.0, 0.5};
  const auto streaming = [&](float part) {
    const head_classes classes{.tokens = 4, .streaming = part, .gates = {gates.data(), 3, 2}};
    std::vector<index_t> all;
    for (index_t head = 0; head < 6; ++head) {
      if (classes.streams(head / 2, head % 2)) all.push_back(head);
    }
    return all;
  };
  CHECK(streaming(0) == std::vector<index_t>{});
  CHECK(streaming(0.34f) == std::vector<index_t>{0, 4});
  CHECK(streaming(0.5f) == std::vector<index_t>{0, 4, 5});
  CHECK(streaming(0.66f) == std::vector<index_t>{0, 2, 4, 5});
  CHECK(streaming(1) == std::vector<index_t>{0, 1, 2, 3, 4, 5});
  CHECK(head_classes{}.streams(7, 9));  // without gates every head
}

TEST_CASE("a streaming head keeps the budget, a retrieval head everything") {
  const std::vector<double> gates{1, 0};
  const head_classes classes{.tokens = 5, .gates = {gates.data(), 1, 2}};
  std::vector<std::vector<float>> heads;
  for (const index_t n : {9, 9}) heads.emplace_back(std::size_t(n), 1.0f);
  const support::owned_scores scores(heads);
  CHECK(support::counts(classes, scores.view(0)) == std::vector<index_t>{9, 5});
}

TEST_CASE("what was fitted streams the same heads, and promises no more than it gives") {
  rng random(1322);
  for (index_t i = 0; i < scaled(500); ++i) {
    const index_t layers = random.between(1, 4), kv_heads = random.between(1, 4);
    std::vector<double> gates;
    for (index_t h = 0; h < layers * kv_heads; ++h) gates.push_back(double(random.between(0, 3)) / 4);
    const head_classes classes{.tokens = random.between(1, 12),
                               .streaming = float(random.between(0, 10)) / 10,
                               .gates = {gates.data(), layers, kv_heads}};
    const head_classes fitted = classes.fitted(random.between(0, 99));
    const auto expected = sorted_classes(gates, double(classes.streaming));
    CAPTURE(i, layers, kv_heads, classes.tokens, classes.streaming);
    for (index_t layer = 0; layer < layers; ++layer) {
      const index_t longest = random.between(1, 20);
      index_t all = 0, most = 0;
      bool any = false;
      for (index_t h = 0; h < kv_heads; ++h) {
        REQUIRE(fitted.streams(layer, h) == bool(expected[std::size_t(layer * kv_heads + h)]));
        REQUIRE(classes.streams(layer, h) == fitted.streams(layer, h));
        const index_t own = fitted.share({layer, layers, h, kv_heads, 0, longest});
        any |= own < longest;
        all += own;
        most = std::max(most, own);
      }
      const token_bound bound = fitted.upper_bound({layer, layers, kv_heads, 0, longest});
      REQUIRE(bound.total == all);
      REQUIRE(bound.longest == most);
      REQUIRE(fitted.fits({layer, layers, kv_heads, 0, longest}) == !any);
    }
  }
}

TEST_CASE("head_classes obeys the laws of budgets") { support::obeys_the_laws_of_budgets(head_classes{}); }

TEST_CASE("gates of another model, or that are none, are refused") {
  std::vector<double> gates{0, 0.5, 1, 0.25};
  const auto refused = [&](const model_shape& shape, float streaming) {
    method recipe;
    recipe.set_budget(20);
    recipe.retain.budget.streaming = streaming;
    recipe.retain.budget.gates = {gates.data(), 2, 2};
    cache<method>(shape, recipe, std::make_shared<cpu::executor>(1));
  };
  CHECK_NOTHROW(refused({2, 4, 2}, 0.5f));
  CHECK_THROWS_WITH(refused({3, 4, 2}, 0.5f),
                    contains("layers and kv_heads of the profile is 2 and 2; expected those of "
                             "the model, 3 and 2"));
  CHECK_THROWS_WITH(refused({2, 4, 4}, 0.5f), contains("the model, 2 and 4"));
  CHECK_THROWS_WITH(refused({2, 4, 2}, 1.5f), contains("streaming is 1.5; expected 0 to 1"));
  gates[3] = std::nan("");
  CHECK_THROWS_WITH(refused({2, 4, 2}, 0.5f), contains("gate of layer 1, kv_head 1"));
}

TEST_CASE("duo_attention keeps everything in retrieval heads, and ends and newest in streaming heads") {
  rng random(1321);
  for (index_t i = 0; i < scaled(1'000); ++i) {
    const index_t layers = random.between(1, 3), kv_heads = random.between(1, 3), group = random.between(1, 2);
    const model_shape shape{layers, kv_heads * group, kv_heads};
    std::vector<double> gates;
    for (index_t h = 0; h < layers * kv_heads; ++h) gates.push_back(double(random.between(0, 4)) / 4);
    method recipe;
    const index_t budget = random.between(1, 20), sinks = random.between(0, std::min(budget - 1, 4));
    recipe.set_budget(budget);
    recipe.retain.scorer.sinks = sinks;
    recipe.retain.budget.streaming = float(random.between(0, 10)) / 10;
    recipe.retain.budget.gates = {gates.data(), layers, kv_heads};
    const auto streams = sorted_classes(gates, double(recipe.retain.budget.streaming));
    cache<method> kv(shape, recipe, std::make_shared<cpu::executor>(1));
    kv.trace_attended(true);
    const index_t id = kv.open();
    index_t next = 0;
    // What a head holds after `fresh` tokens came last, all of which it holds whatever the budget.
    const auto expected = [&](index_t head, index_t fresh) {
      std::vector<index_t> all;
      const index_t kept = std::min(next, std::max(budget, fresh));
      const index_t first = streams[std::size_t(head)] ? std::min(sinks, kept - std::min(kept, fresh)) : next;
      for (index_t t = 0; t < next; ++t) {
        if (t < first || t >= next - (kept - std::min(first, kept)) || !streams[std::size_t(head)]) all.push_back(t);
      }
      return all;
    };
    const auto rows = [&](index_t count, index_t heads) {
      return support::normals(random, std::size_t(count * heads * dim));
    };
    CAPTURE(i, layers, kv_heads, budget, sinks, recipe.retain.budget.streaming);
    for (index_t turn = random.between(1, 2); turn > 0; --turn) {
      const index_t prompt = random.between(1, 40);
      for (index_t layer = 0; layer < layers; ++layer) {
        const auto k = rows(prompt, kv_heads);
        kv.prefill(layer, id, rows_view<const float>{}, nhd_rows(k.data(), prompt, kv_heads, dim),
                   nhd_rows(k.data(), prompt, kv_heads, dim));
      }
      next += prompt;
      kv.end_prefill(id);
      for (index_t steps = random.between(0, 4);; --steps) {
        for (index_t head = 0; head < layers * kv_heads; ++head)
          REQUIRE(kv.positions(head / kv_heads, id, head % kv_heads) == expected(head, 0));
        if (steps == 0) break;
        const batch step = kv.prepare_step({id}, 1);
        ++next;
        for (index_t layer = 0; layer < layers; ++layer) {
          const auto q = rows(1, kv_heads * group), k = rows(1, kv_heads);
          std::vector<float> out(q.size());
          kv.decode(layer, step, nhd_rows(q.data(), 1, kv_heads * group, dim), nhd_rows(k.data(), 1, kv_heads, dim),
                    nhd_rows(k.data(), 1, kv_heads, dim), nhd_rows(out.data(), 1, kv_heads * group, dim));
          for (index_t h = 0; h < kv_heads; ++h)
            REQUIRE(kv.attended(layer, id)[std::size_t(h)] == expected(layer * kv_heads + h, 1));
        }
      }
    }
  }
}
