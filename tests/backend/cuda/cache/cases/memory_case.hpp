// Device memory that counts, and that runs out when a test wants it to.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cache_case.hpp"

namespace gpu_test {

/// Hands out cudaMalloc's memory. Answers "none" once, at the allocation with the number `fails_at`.
struct counted_memory {
  std::map<void*, std::size_t> live;
  long taken = 0, fails_at = -1;

  std::size_t bytes() const {
    std::size_t total = 0;
    for (const auto& [data, size] : live) total += size;
    return total;
  }
  cuda::memory_source source() {
    return {
        [](void* self, std::size_t bytes) { return static_cast<counted_memory*>(self)->take(bytes); },
        [](void* self, void* data, std::size_t bytes) { static_cast<counted_memory*>(self)->give_back(data, bytes); },
        this};
  }

 private:
  void* take(std::size_t bytes) {
    if (taken++ == fails_at) return nullptr;
    void* data = nullptr;
    cuda::check(cudaMalloc(&data, bytes), "cudaMalloc");
    live[data] = bytes;
    return data;
  }
  void give_back(void* data, std::size_t bytes) {
    REQUIRE(live.count(data) == 1);
    REQUIRE(live[data] == bytes);
    live.erase(data);
    cudaFree(data);
  }
};

/// A conversation of which every call may fail once for want of memory: it is then made again.
template <class Method>
class faulty_conversation {
  static constexpr int D = Method::layout_type::k_dim;
  using T = typename Method::layout_type::element_type;

 public:
  /// The outputs of all calls in order; `failures` counts errors. The same `inputs`, the same calls. fits: the cache's
  /// memory follows what is stored.
  static std::vector<float> hold(counted_memory& memory, const std::deque<step_rows<T>>& inputs, long& failures,
                                 bool fits) {
    const model_shape shape{2, 4, 2};
    const cuda::allocate_from here(memory.source());
    Method method;
    support::shorten_segments(method);
    method.set_budget(64);
    if constexpr (requires { method.retain.scorer.window; }) method.retain.scorer.window = 16;
    cuda::cache_options options;
    options.sequences = 2;
    options.tokens = 400;
    std::optional<cuda::cache<Method>> made;
    const auto attempt = [&](const auto& call) {
      for (int tries = 0;; ++tries) {
        try {
          return call();
        } catch (const error& problem) {
          INFO(problem.what());
          REQUIRE(tries == 0);
          REQUIRE(std::string(problem.what()).find("device memory") != std::string::npos);
          ++failures;
        }
      }
    };
    attempt([&] { made.emplace(shape, method, options); });
    cuda::cache<Method>& kv = *made;
    std::vector<float> all;
    for (index_t id = 0; id < 2; ++id) REQUIRE(kv.open() == id);
    std::size_t next = 0;
    for (int turn = 0; turn < 2; ++turn) {
      if (fits && turn == 1) attempt([&] { kv.fit_memory(100, nullptr); });
      for (index_t id = 0; id < 2; ++id) {
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          const auto& x = inputs[next++];
          attempt([&] {
            kv.prefill(layer, id, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2), nullptr);
          });
          buffer<float> out(std::size_t(x.tokens * 4 * D));
          attempt([&] {
            kv.prefill_attention(layer, id, x.rows(x.dq.data, 4), nhd_rows(out.data, x.tokens, 4, D), {}, nullptr);
          });
          for (const float value : out.get()) all.push_back(value);
        }
        attempt([&] { kv.end_prefill(id, nullptr); });
      }
      if (fits) {
        const std::size_t before = memory.bytes();
        attempt([&] { kv.fit_memory(3, nullptr); });
        REQUIRE((turn == 0 ? memory.bytes() < before : memory.bytes() <= before));
      }
      if (turn == 1) attempt([&] { kv.set_budget(80); });
      for (int step = 0; step < 3; ++step) {
        const long before = memory.taken;
        const batch now = attempt([&] { return kv.prepare_step({0, 1}, 1, nullptr); });
        attempt([&] { kv.begin_step(now, nullptr); });
        for (index_t layer = 0; layer < shape.layers; ++layer) {
          const auto& x = inputs[next++];
          buffer<float> out(std::size_t(2 * 4 * D));
          attempt([&] {
            kv.decode(layer, now, x.rows(x.dq.data, 4), x.rows(x.dk.data, 2), x.rows(x.dv.data, 2),
                      nhd_rows(out.data, 1, 4, D, 2), {}, nullptr);
          });
          for (const float value : out.get()) all.push_back(value);
        }
        REQUIRE(memory.taken == before);  // no step allocates
      }
    }
    for (index_t layer = 0; layer < shape.layers; ++layer) {
      for (const index_t at : kv.positions(layer, 1, 1)) all.push_back(float(at));
    }
    return all;
  }

  static void fails_everywhere_once(bool fits = false) {
    std::deque<step_rows<T>> inputs;
    for (int turn = 0; turn < 2; ++turn) {
      for (index_t i = 0; i < 4; ++i) inputs.emplace_back(1, 90 + 3 * (i / 2), model_shape{2, 4, 2}, D);
      for (index_t i = 0; i < 6; ++i) inputs.emplace_back(2, 1, model_shape{2, 4, 2}, D);
    }
    counted_memory plain, whole;
    long failures = 0;
    const auto expected = hold(plain, inputs, failures, false);
    REQUIRE(same_bits(hold(whole, inputs, failures, fits), expected));
    REQUIRE(failures == 0);
    REQUIRE(whole.live.empty());
    const long step = support::scaled(1000) == 1000 ? 1 : 7;
    for (long at = 0; at < whole.taken; at += step) {
      counted_memory memory;
      memory.fails_at = at;
      failures = 0;
      const auto got = hold(memory, inputs, failures, fits);
      INFO("allocation " << at << " of " << whole.taken);
      REQUIRE(failures == 1);
      REQUIRE(same_bits(got, expected));
      REQUIRE(memory.live.empty());
    }
  }
};

}  // namespace gpu_test
