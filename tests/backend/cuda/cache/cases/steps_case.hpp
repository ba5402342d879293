// Steps of a CUDA cache to the bit: of a cache whose ids had an owner before, and of a recorded step that is replayed.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache_case.hpp"

namespace gpu_test {

/// Steps before any prompt give the bits of a new cache, whoever had the id before.
template <class Method>
requires runs_on_devices<Method> void reopen_and_step() {
  using T = typename Method::layout_type::element_type;
  constexpr int D = Method::layout_type::k_dim;
  const model_shape shape = support::called_shape<Method>({shrunk(2, 1), 4, 2});
  Method method;
  support::shorten_segments(method);
  method.set_budget(64);
  cuda::cache_options options;
  options.tokens = 200;
  cuda::cache<Method> used(shape, method, options), fresh(shape, method, options);
  const step_rows<T> prompt(1, 90, shape, D);
  const auto boundaries = random_boundaries<Method>(90);
  REQUIRE(used.open() == 0);
  for (index_t layer = 0; layer < shape.layers; ++layer) {
    used.prefill(layer, 0, prompt.rows(prompt.dq.data, 4), prompt.rows(prompt.dk.data, 2),
                 prompt.rows(prompt.dv.data, 2), nullptr, boundaries);
  }
  give_device_scores(used, 0);
  used.end_prefill(0, nullptr);
  used.close(0);
  REQUIRE(used.open() == 0);
  REQUIRE(fresh.open() == 0);
  buffer<float> out(std::size_t(shape.q_heads * D)), expected(out.count);
  for (index_t i = 0; i < shrunk(100, 6); ++i) {
    const step_rows<T> x(1, 1, shape, D);
    const auto ends = random_boundaries<Method>(1);
    for (auto [kv, to] : {std::pair{&used, &out}, std::pair{&fresh, &expected}}) {
      const batch step = kv->prepare_step({0}, 1, nullptr, ends);
      kv->begin_step(step, nullptr);
      for (index_t layer = 0; layer < shape.layers; ++layer) {
        kv->decode(layer, step, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                   nhd_rows(to->data, 1, shape.q_heads, D), {}, nullptr);
      }
    }
    REQUIRE(same_bits(out.get(), expected.get()));
  }
}

/// A whole step recorded once for each set of actions, and replayed while lengths grow and for ids in any order, gives the bits of the
/// same steps launched one by one. `configure(method)`: its parameters. Returns how many kinds of steps there were.
template <class Method, class Configure>
std::size_t replay_steps_of(const Configure& configure) {
  using T = typename Method::layout_type::element_type;
  constexpr int D = Method::layout_type::k_dim;
  const model_shape shape = support::called_shape<Method>({shrunk(2, 1), 8, 2});
  std::vector<index_t> ids{0, 1};
  Method method;
  support::shorten_segments(method);
  method.set_budget(64);
  configure(method);
  cuda::cache_options options;
  options.sequences = 2;
  options.tokens = 512;
  options.smallest_budget = 16;
  cuda::cache<Method> recorded(shape, method, options);
  for (const index_t id : ids) {  // the second one's budget grows from step to step
    recorded.open(id == 1 && Method::budgets.largest > 0 ? sequence_options{{0, 0.25}, {}} : sequence_options{});
    const auto boundaries = random_boundaries<Method>(90 + 7 * id);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      const step_rows<T> x(1, 90 + 7 * id, shape, D);
      recorded.prefill(layer, id, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                       x.rows(x.dv.data, x.kv_heads), nullptr, boundaries);
      buffer<float> unread(x.q.size());
      recorded.prefill_attention(layer, id, x.rows(x.dq.data, x.q_heads), nhd_rows(unread.data, x.tokens, x.q_heads, D),
                                 {}, nullptr);
      cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    give_device_scores(recorded, id);
    recorded.end_prefill(id, nullptr);
  }
  cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda::cache<Method> launched(recorded);
  step_rows<T> x(2, 1, shape, D);
  buffer<float> out(std::size_t(2 * shape.layers * shape.q_heads * D)), other(out.count);
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto layers = [&](cuda::cache<Method>& cache, const batch& step, float* to) {
    cache.begin_step(step, stream);
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      cache.decode(layer, step, x.rows(x.dq.data, x.q_heads), x.rows(x.dk.data, x.kv_heads),
                   x.rows(x.dv.data, x.kv_heads), nhd_rows(to + layer * 2 * shape.q_heads * D, 1, shape.q_heads, D, 2),
                   {}, stream);
    }
  };
  std::map<std::pair<bool, bool>, std::unique_ptr<graph>> graphs;
  const index_t steps = shrunk(40, 5);  // rows have room for 16 and move between replays
  for (index_t i = 0; i < steps; ++i) {
    std::swap(ids[0], ids[1]);
    const auto ends = random_boundaries<Method>(2);
    const batch now = recorded.prepare_step(ids, 1, stream, ends);
    auto& step = graphs[{now.evicts_first, now.evicts_last}];
    if (!step) step = std::make_unique<graph>(stream, [&] { layers(recorded, now, out.data); });
    step->launch();
    layers(launched, launched.prepare_step(ids, 1, stream, ends), other.data);
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    REQUIRE(same_bits(out.get(), other.get()));
    x.dq.set(normal<T>(x.q.size(), 1.5f));
    x.dk.set(normal<T>(x.k.size(), 1.5f));
  }
  for (const index_t id : ids) {
    REQUIRE(recorded.next_position(id) == 90 + 7 * id + steps);
    for (index_t h = 0; h < shape.kv_heads; ++h) {
      REQUIRE(recorded.positions(shape.layers - 1, id, h) == launched.positions(shape.layers - 1, id, h));
      REQUIRE(recorded.readable(shape.layers - 1, id, h) == launched.readable(shape.layers - 1, id, h));
      REQUIRE(recorded.positions(shape.layers - 1, id, h).back() == 89 + 7 * id + steps);
    }
  }
  const std::size_t kinds = graphs.size();
  graphs.clear();
  cuda::check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return kinds;
}

template <class Method>
void reopen_and_step() {
  say_host_only();
}
template <class Method>
void replay_steps() {
  if constexpr (runs_on_devices<Method>) {
    replay_steps_of<Method>([](Method&) {});
  } else {
    say_host_only();
  }
}

}  // namespace gpu_test
