// What a sequence takes on the device at any moment against `bound`, and a pool that has just as much.
#pragma once

#include <algorithm>

#include "cache_case.hpp"

namespace gpu_test {

/// One prompt and its answer; chunk 0: in one chunk.
struct bounded_turn {
  index_t prompt, answer, chunk, step;
  bool layers_end = false;
  turn_extent extent() const { return {prompt, answer, chunk, 1, layers_end}; }
};

/// Runs the turn in a new sequence, and closes it; after every call the sequence takes no more than `bound`.
template <class Method>
void run_within(cuda::cache<Method>& kv, const bounded_turn& turn, const capacity& bound) {
  using T = typename Method::layout_type::element_type;
  constexpr int D = Method::layout_type::k_dim;
  const model_shape& shape = kv.shape();
  const index_t id = kv.open();
  buffer<float> out(std::size_t(turn.prompt * shape.q_heads * D));
  kv.announce(id, turn.prompt);
  for (index_t done = 0, count = 0; done < turn.prompt; done += count) {
    count = std::min(turn.chunk > 0 ? turn.chunk : turn.prompt, turn.prompt - done);
    const step_rows<T> x(1, count, shape, D);
    const auto ends = random_boundaries<Method>(count);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      give_device_scores(kv, layer, id);
      kv.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                 nullptr, ends);
      REQUIRE(kv.bytes(id) <= bound.bytes);
      kv.prefill_attention(layer, id, x.rows(x.dq.data, x.q_heads), nhd_rows(out.data, count, shape.q_heads, D), {},
                           nullptr);
      give_device_scores(kv, layer, id);
      if (turn.layers_end) kv.end_layer(layer, id, nullptr);
      REQUIRE(kv.bytes(id) <= bound.bytes);
    }
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // x is released now
  }
  kv.end_prefill(id, nullptr);
  REQUIRE(kv.bytes(id) <= bound.bytes);
  for (index_t done = 0, count = 0; done < turn.answer; done += count) {
    count = std::min(turn.step, turn.answer - done);
    const step_rows<T> x(1, count, shape, D);
    const batch step = kv.prepare_step({id}, count, nullptr, random_boundaries<Method>(count));
    kv.begin_step(step, nullptr);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      kv.decode(layer, step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads), x.rows(x.dv.data, x.kv_heads),
                nhd_rows(out.data, count, shape.q_heads, D), {}, nullptr);
    }
    REQUIRE(kv.bytes(id) <= bound.bytes);
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  kv.close(id);
}

/// Turns in a cache with rows for everything, then each in a cache whose pool has what `bound` says and no more.
template <class Method>
requires runs_on_devices<Method> void stay_within_bound() {
  using layout = typename Method::layout_type;
  const model_shape shape = support::called_shape<Method>({3, 4, 2});
  Method method;
  support::shorten_segments(method);
  method.set_budget(64);
  cuda::cache_options options;
  options.tokens = 300;
  options.step_tokens = 3;
  cuda::cache<Method> ample(shape, method, options);
  for (const bounded_turn& turn : {bounded_turn{200, shrunk(60, 5), 0, 1},
                                   {150, shrunk(30, 5), 64, 3},
                                   {90, shrunk(170, 5), 37, 2},
                                   {200, shrunk(30, 5), 0, 1, true}}) {
    CAPTURE(turn.prompt, turn.answer, turn.chunk, turn.step);
    const capacity bound = ample.bound(turn.extent());
    REQUIRE(ample.available().covers(bound));
    run_within(ample, turn, bound);
    cuda::cache_options tight = options;
    tight.rows = (bound.bytes + layout::token_bytes() - 1) / layout::token_bytes();
    Method limited = method;
    if constexpr (requires { limited.placement.max_pages; }) {
      limited.placement.max_pages = index_t(bound.pages);
    } else if constexpr (requires { layout::placement_type::page; }) {
      tight.rows = bound.pages * layout::placement_type::page * shape.kv_heads;
    }
    cuda::cache<Method> scarce(shape, limited, tight);
    REQUIRE(scarce.bound(turn.extent()) == bound);
    REQUIRE(scarce.available().covers(bound));
    run_within(scarce, turn, bound);
    run_within(scarce, turn, bound);  // everything was given back
    const index_t open = scarce.open();
    REQUIRE(scarce.available() == capacity{});  // no more sequences
    scarce.close(open);
  }
}
template <class Method>
void stay_within_bound() {}  // a method of the host

}  // namespace gpu_test
