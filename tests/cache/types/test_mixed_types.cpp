// q of one type, k and v of another: the bits of the call with everything in fp32, where k and v hold fp16 numbers.
#include "catch.hpp"

#include <memory>
#include <vector>

#include <tessera/methods/full.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/snapkv.hpp>
#include <tessera/methods/tangram.hpp>
#include <tessera/tessera.hpp>

#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::rng;

namespace {

constexpr index_t dim = 64;
const model_shape shape{2, 4, 2};

/// The rows of one call, as fp32 and as other types of the same numbers.
template <class Q, class K>
struct rows_of_call {
  std::vector<float> q, k, v;
  std::vector<Q> other_q;
  std::vector<K> other_k, other_v;
  index_t tokens;

  rows_of_call(rng& random, index_t count) : tokens(count) {
    const auto fill = [&](auto& other, std::vector<float>& plain, index_t heads) {
      for (index_t i = 0; i < count * heads * dim; ++i) {
        other.emplace_back(random.normal());
        plain.push_back(float(other.back()));
      }
    };
    fill(other_q, q, shape.q_heads);
    fill(other_k, k, shape.kv_heads);
    fill(other_v, v, shape.kv_heads);
  }
  template <class T>
  rows_view<const T> rows(const std::vector<T>& values, index_t heads) const {
    return nhd_rows(values.data(), tokens, heads, dim);
  }
};

/// The same conversation in two caches: in one with fp32 rows, in the other with q as `Q`, k and v as `K`.
template <class Q, class K, class Recipe>
void same_conversation(Recipe recipe, index_t budget) {
  CAPTURE(Recipe::name);
  rng random(77);
  if constexpr (requires { recipe.set_budget(budget); }) recipe.set_budget(budget);
  if constexpr (requires { recipe.retain.scorer.window; }) recipe.retain.scorer.window = 8;
  const auto workers = std::make_shared<cpu::executor>(1);
  cache<Recipe> plain(shape, recipe, workers), mixed(shape, recipe, workers);
  const auto both = [&](index_t tokens, const auto& call) {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const rows_of_call<Q, K> given(random, tokens);
      std::vector<float> a(std::size_t(tokens * shape.q_heads * dim), 7.0f), b = a;
      call(plain, layer, given.rows(given.q, shape.q_heads), given.rows(given.k, shape.kv_heads),
           given.rows(given.v, shape.kv_heads), nhd_rows(a.data(), tokens, shape.q_heads, dim));
      call(mixed, layer, given.rows(given.other_q, shape.q_heads), given.rows(given.other_k, shape.kv_heads),
           given.rows(given.other_v, shape.kv_heads), nhd_rows(b.data(), tokens, shape.q_heads, dim));
      REQUIRE(support::same_bits(a, b));
    }
  };
  const index_t id = plain.open(), other = plain.open();
  REQUIRE((mixed.open() == id && mixed.open() == other));
  const auto same_positions = [&] {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      for (index_t head = 0; head < shape.kv_heads; ++head)
        REQUIRE(plain.positions(layer, id, head) == mixed.positions(layer, id, head));
    }
  };

  for (const index_t tokens : {70, 33}) {
    both(tokens, [&](auto& kv, index_t layer, auto q, auto k, auto v, auto out) {
      kv.prefill(layer, id, q, k, v);
      kv.prefill_attention(layer, id, q, out);
    });
  }
  both(5,
       [&](auto& kv, index_t layer, auto q, auto k, auto v, auto out) { kv.reread(layer, id, 3, 20, q, k, v, out); });
  plain.end_prefill(id), mixed.end_prefill(id);
  same_positions();
  const host_vector<batch_item> items{{other, 40, true}, {id, 2, false}};
  const mixed_batch work = plain.prepare(items), same_work = mixed.prepare(items);
  both(42, [&](auto& kv, index_t layer, auto q, auto k, auto v, auto out) {
    kv.process(layer, &kv == &plain ? work : same_work, q, k, v, out);
  });
  for (int i = 0; i < 3; ++i) {
    const batch step = plain.prepare_step({id}, 1 + i), same_step = mixed.prepare_step({id}, 1 + i);
    both(1 + i, [&](auto& kv, index_t layer, auto q, auto k, auto v, auto out) {
      kv.decode(layer, &kv == &plain ? step : same_step, q, k, v, out);
      kv.attend(layer, &kv == &plain ? step : same_step, q, out);
    });
  }
  const draft_step draft = plain.prepare_draft({id}, 4), same_draft = mixed.prepare_draft({id}, 4);
  both(4, [&](auto& kv, index_t layer, auto q, auto k, auto v, auto out) {
    kv.decode(layer, &kv == &plain ? draft : same_draft, q, k, v, out);
  });
  plain.accept(id, 2), mixed.accept(id, 2);
  same_positions();
  CHECK(plain.bytes(id) == mixed.bytes(id));
}

/// As llama.cpp has them.
template <template <class, int, int, class> class Method>
void over_fp16_rows(index_t budget) {
  same_conversation<float, fp16>(Method<float, dim, dim, dense<float, dim>>{}, budget);
}

}  // namespace

TEST_CASE("fp32 queries over fp16 keys and values give the bits of fp32 rows", "[cache]") {
  over_fp16_rows<full>(0);
  over_fp16_rows<snapkv>(40);
  over_fp16_rows<quest>(48);
  over_fp16_rows<h2o>(40);
  same_conversation<float, fp16>(mosaickv<float, dim>{}, 32);
  same_conversation<float, fp16>(loopserve<float, dim>{}, 40);
  same_conversation<float, fp16>(tangram<float, dim>{}, 40);
}

TEST_CASE("other pairs of types, and a cache that stores what it is handed", "[cache]") {
  same_conversation<float, fp16>(snapkv<fp16, dim>{}, 40);
  same_conversation<fp16, float>(snapkv<float, dim>{}, 40);
}
