// Layouts, layer roles and long runs of the CUDA cache: pages, dense and sliding layers, memory that does not grow.
#include "calls_case.hpp"
#include "memory_case.hpp"
#include "tessera/layout/dense.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/rocketkv.hpp"
#include "tessera/methods/snapkv.hpp"

using namespace tessera;
using namespace gpu_test;

namespace {

template <class Method, class Layout>
using with_layout = recipe<typename Method::retain_type, Layout, typename Method::retrieve_type,
                           typename Method::attention_type, typename Method::schedule_type>;
using paged = stored<dense_rows<bf16, 64>, fixed_pages<16>>;

/// Device memory in use, in bytes.
std::size_t used() {
  std::size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return total - free;
}

/// Opens, prefills, decodes and closes conversations of random lengths, up to `open` at a time.
template <class Method>
void serve(index_t conversations, index_t open) {
  constexpr int D = Method::layout_type::k_dim;
  using T = typename Method::layout_type::element_type;
  const model_shape shape{2, 4, 2};
  Method method;
  method.set_budget(48);
  cuda::cache_options options;
  options.sequences = open;
  options.tokens = 2000;
  options.step_tokens = 2;
  cuda::cache<Method> cache(shape, method, options);
  std::vector<index_t> ids;
  buffer<float> out(std::size_t(open * 2 * shape.q_heads * D));
  out.fill(0);
  const step_rows<T> prompt(1, 600, shape, D), fresh(open, 2, shape, D);
  std::size_t settled = 0;
  for (index_t served = 0; served < conversations;) {
    if (index_t(ids.size()) < open && draw(0, 2)) {
      const index_t id = cache.open(), tokens = draw(1, 600);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        const auto cut = [&](rows_view<const T> rows) {
          rows.tokens = tokens;
          return rows;
        };
        cache.prefill(layer, id, cut(prompt.rows(prompt.dq.data, 4)), cut(prompt.rows(prompt.dk.data, 2)),
                      cut(prompt.rows(prompt.dv.data, 2)), nullptr);
      }
      cache.end_prefill(id, nullptr);
      ids.push_back(id);
    } else if (!ids.empty()) {
      std::vector<index_t> batch_ids;
      for (const index_t id : ids) {
        if (draw(0, 3)) batch_ids.push_back(id);
      }
      if (!batch_ids.empty()) {
        std::shuffle(batch_ids.begin(), batch_ids.end(), std::mt19937(unsigned(served)));
        const index_t n = draw(1, 2), batch_size = index_t(batch_ids.size());
        const batch step = cache.prepare_step(batch_ids, n, nullptr);
        cache.begin_step(step, nullptr);
        const auto cut = [&](rows_view<const T> rows) {
          rows.sequences = batch_size;
          rows.tokens = n;
          return rows;
        };
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          cache.decode(layer, step, cut(fresh.rows(fresh.dq.data, 4)), cut(fresh.rows(fresh.dk.data, 2)),
                       cut(fresh.rows(fresh.dv.data, 2)), nhd_rows(out.data, n, shape.q_heads, D, batch_size), {},
                       nullptr);
        }
      }
      if (draw(0, 3) == 0 || index_t(ids.size()) == open) {
        const std::size_t which = std::size_t(draw(0, index_t(ids.size()) - 1));
        cache.close(ids[which]);
        ids.erase(ids.begin() + offset_t(which));
        ++served;
        if (served == std::min<index_t>(200, conversations / 2)) settled = used();
      }
    }
  }
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (const float x : out.get()) REQUIRE(x == x);
  if (support::scaled(1000) == 1000) CHECK(used() <= settled);  // small runs share the device with others
}

}  // namespace

TEST_CASE("snapkv in pages holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<with_layout<snapkv<bf16, 64>, paged>>(30);
}
TEST_CASE("rocketkv in pages holds the CPU's conversations on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  hold_conversations<with_layout<rocketkv<bf16, 64>, paged>>(30);
}
TEST_CASE("a recorded step in pages follows its growing cache", "[gpu][cache]") {
  if (gpu_missing()) return;
  replay_steps<with_layout<full<bf16, 64>, paged>>();
}

TEST_CASE("random calls of snapkv in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<with_layout<snapkv<bf16, 64>, paged>>();
}
TEST_CASE("random calls of rocketkv in pages do what the contract says on the device", "[gpu][cache][calls]") {
  if (gpu_missing()) return;
  call_at_random<with_layout<rocketkv<bf16, 64>, paged>>();
}

TEST_CASE("a cache serves conversations of all lengths in the memory that it began with", "[gpu][cache]") {
  if (gpu_missing()) return;
  serve<snapkv<bf16, 64>>(support::scaled(2500), 64);
  serve<rocketkv<bf16, 64>>(support::scaled(2500), 64);
  serve<with_layout<snapkv<bf16, 64>, paged>>(support::scaled(2500), 64);
  serve<full<bf16, 64>>(support::scaled(2500), 64);
}

namespace {

/// Two conversations in a pool that holds one and a half: what does not fit is refused, and nothing has changed.
template <class Method>
void refuse_and_go_on() {
  constexpr int D = Method::layout_type::k_dim;
  using T = typename Method::layout_type::element_type;
  const model_shape shape{3, 4, 2};
  Method method;
  cuda::cache_options options;
  options.sequences = 2;
  options.tokens = 400;
  options.rows = shape.layers * shape.kv_heads * 560;  // 224 tokens that need a copy beside them when they move
  cuda::cache<Method> cache(shape, method, options);
  const auto prefill = [&](cuda::cache<Method>& to, index_t id, index_t tokens) {
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<T> x(1, tokens, shape, D);
      to.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
    }
    to.end_prefill(id, nullptr);
  };
  const index_t first = cache.open(), second = cache.open();
  prefill(cache, first, 200);
  cuda::cache<Method> before(cache);
  REQUIRE_THROWS_AS(cache.reserve(second, 390, nullptr), error);
  REQUIRE_THROWS_AS(cache.reserve(second, 401, nullptr), error);
  REQUIRE_THROWS_AS(cache.prepare_step({first, second}, 9, nullptr), error);
  REQUIRE(cache.bytes(first) == before.bytes(first));
  REQUIRE(cache.bytes(second) == 0);
  buffer<float> out(std::size_t(shape.q_heads * D)), expected(out.count);
  for (index_t i = 0; i < 40; ++i) {  // rows move on the way
    const step_rows<T> x(1, 1, shape, D);
    for (auto [to, result] : {std::pair{&cache, &out}, std::pair{&before, &expected}}) {
      const batch step = to->prepare_step({first}, 1, nullptr);
      to->begin_step(step, nullptr);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        to->decode(layer, step, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                   nhd_rows(result->data, 1, shape.q_heads, D), {}, nullptr);
      }
    }
    REQUIRE(same_bits(out.get(), expected.get()));
  }
  REQUIRE(cache.positions(2, first, 1) == before.positions(2, first, 1));
  cache.close(first);
  prefill(cache, second, 200);  // what was given back can be taken
}

}  // namespace

TEST_CASE("a pool without room refuses, and the cache goes on as before", "[gpu][cache]") {
  if (gpu_missing()) return;
  refuse_and_go_on<full<bf16, 64>>();
  refuse_and_go_on<with_layout<full<bf16, 64>, paged>>();
}

TEST_CASE("a step begins once, its layers come in order, and nobody steps in between", "[gpu][cache]") {
  if (gpu_missing()) return;
  using method = full<bf16, 64>;
  const model_shape shape{2, 4, 2};
  cuda::cache_options options;
  options.sequences = 3;
  options.tokens = 100;
  cuda::cache<method> kv(shape, method(), options);
  const step_rows<bf16> prompt(1, 20, shape, 64), fresh(2, 1, shape, 64);
  const auto prefill = [&](index_t layer, index_t id) {
    kv.prefill(layer, id, prompt.rows(prompt.dq.data, 4), prompt.rows(prompt.dk.data, 2),
               prompt.rows(prompt.dv.data, 2), nullptr);
  };
  for (index_t id = 0; id < 3; ++id) {
    REQUIRE(kv.open() == id);
    CHECK(kv.attended(1, id).empty());  // nothing was traced
    for (index_t layer = 0; layer < 2; ++layer) prefill(layer, id);
    kv.end_prefill(id, nullptr);
  }
  buffer<float> out(2 * 4 * 64);
  const auto decode = [&](index_t layer, const batch& step, index_t skip = 0) {
    auto q = fresh.rows(fresh.dq.data, 4);
    q.data += skip;
    q.sequences = step.sequences();
    auto k = fresh.rows(fresh.dk.data, 2), v = fresh.rows(fresh.dv.data, 2);
    k.sequences = v.sequences = step.sequences();
    kv.decode(layer, step, q, k, v, nhd_rows(out.data, 1, 4, 64, step.sequences()), {}, nullptr);
  };
  CHECK_THROWS_WITH(kv.begin_step({}, nullptr), contains("what prepare_step returned last"));
  const batch first = kv.prepare_step({0}, 1, nullptr), both = kv.prepare_step({1, 2}, 1, nullptr);
  CHECK_THROWS_WITH(kv.begin_step(first, nullptr), contains("what prepare_step returned last"));
  CHECK_THROWS_WITH(decode(0, first), contains("what prepare_step returned last"));
  CHECK_THROWS_WITH(decode(0, both), contains("calls of begin_step for a step is 0"));
  kv.begin_step(both, nullptr);
  CHECK_THROWS_WITH(kv.begin_step(both, nullptr), contains("calls of begin_step for a step is 2"));
  CHECK_THROWS_WITH(decode(0, both, 1), contains("address of q"));
  decode(0, both);
  CHECK_THROWS_WITH(decode(0, both), contains("layer of a step is 0"));
  CHECK_THROWS_WITH(prefill(1, 2), contains("sequence in the middle of a step is 2"));
  CHECK_THROWS_WITH(kv.reserve(1, 9, nullptr), contains("sequence in the middle of a step is 1"));
  CHECK_THROWS_WITH(kv.prepare_step({2}, 1, nullptr), contains("sequence in the middle of a step is 2"));
  decode(1, both);
  kv.begin_step(kv.prepare_step({1, 2}, 1, nullptr), nullptr);
  kv.close(2);
  CHECK_THROWS_WITH(decode(0, both), contains("sequence is 2"));
  REQUIRE(kv.open() == 2);  // in the closed one's place
  CHECK_THROWS_AS(decode(0, both), error);
  CHECK(kv.positions(1, 2, 0).empty());
}

TEST_CASE("every allocation of a cache fails once, and the conversation goes on as if it had not", "[gpu][cache]") {
  if (gpu_missing()) return;
  faulty_conversation<snapkv<bf16, 64>>::fails_everywhere_once();
  faulty_conversation<rocketkv<bf16, 64>>::fails_everywhere_once();
  faulty_conversation<with_layout<snapkv<bf16, 64>, paged>>::fails_everywhere_once();
}

TEST_CASE("dense and sliding layers beside compressed ones hold what they should on the device", "[gpu][cache]") {
  if (gpu_missing()) return;
  using method = rocketkv<bf16, 64>;
  const model_shape shape{3, 4, 2, 40, {false, false, true}};
  method recipe;
  recipe.set_budget(64);
  recipe.retain.budget.max_new = 32;
  recipe.retain.scorer.window = 8;
  recipe.dense_layers = 1;
  cuda::cache_options options;
  options.tokens = 600;
  cuda::cache<method> device(shape, recipe, options);
  cache<method> host(shape, recipe, std::make_shared<cpu::executor>(1));
  const index_t id = device.open();
  host.open();
  for (index_t layer = 0; layer < 3; ++layer) {
    const step_rows<bf16> x(1, 300, shape, 64);
    host.prefill(layer, id, x.rows(x.q.data(), 4), x.rows(x.k.data(), 2), x.rows(x.v.data(), 2));
    device.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
  }
  host.end_prefill(id);
  device.end_prefill(id, nullptr);
  for (index_t i = 0; i < 60; ++i) {
    const batch on_host = host.prepare_step({id}, 1), on_device = device.prepare_step({id}, 1, nullptr);
    device.begin_step(on_device, nullptr);
    for (index_t layer = 0; layer < 3; ++layer) {
      const step_rows<bf16> x(1, 1, shape, 64);
      std::vector<float> out(4 * 64);
      buffer<float> dout(out.size());
      host.decode(layer, on_host, x.rows(x.q.data(), 4), x.rows(x.k.data(), 2), x.rows(x.v.data(), 2),
                  nhd_rows(out.data(), 1, 4, 64));
      device.decode(layer, on_device, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                    nhd_rows(dout.data, 1, 4, 64), {}, nullptr);
      if (layer != 1) REQUIRE(relative_error(dout.get(), out) < 8e-3);  // of layer 1, sets may differ at a cut
    }
    REQUIRE(device.positions(0, id, 1) == host.positions(0, id, 1));
    REQUIRE(device.positions(0, id, 1).size() == std::size_t(301 + i));
    const auto kept = device.positions(2, id, 0);
    REQUIRE(kept.size() >= 40);
    REQUIRE(kept.size() <= 40 + 17);
    REQUIRE(kept.back() == 300 + i);
  }
}
