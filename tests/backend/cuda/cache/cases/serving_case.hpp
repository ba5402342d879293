// Conversations that share one CUDA cache: they come and go, run out of room, and leave its memory as it was.
#pragma once

#include <utility>
#include <vector>

#include "memory_case.hpp"

namespace gpu_test {

/// Opens, prefills, decodes and closes conversations of random lengths, up to `open` at a time.
template <class Method>
void serve(index_t conversations, index_t open) {
  constexpr int D = Method::layout_type::k_dim;
  using T = typename Method::layout_type::element_type;
  const model_shape shape{2, 4, 2};
  Method method;
  support::shorten_segments(method);
  method.set_budget(48);
  cuda::cache_options options;
  options.sequences = open;
  options.tokens = 2000;
  options.step_tokens = 2;
  counted_memory memory;
  const cuda::allocate_from here(memory.source());
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
        if (served == std::min<index_t>(200, conversations / 2)) settled = memory.bytes();
      }
    }
  }
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (const float x : out.get()) REQUIRE(x == x);
  CHECK(memory.bytes() <= settled);
}

/// Two conversations in a pool that holds one and a half: what does not fit is refused, and nothing has changed.
template <class Method>
void refuse_and_go_on() {
  constexpr int D = Method::layout_type::k_dim;
  using T = typename Method::layout_type::element_type;
  const model_shape shape{3, 4, 2};
  Method method;
  support::shorten_segments(method);
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

}  // namespace gpu_test
