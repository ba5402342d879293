// CPU decode attention over 32,768 tokens: `full` against `snapkv` at 4,096, and `full` against the read bandwidth that
// a plain sum over the same bytes reaches with the same threads. Ratios count; absolute times hold for one machine
// only. On a machine that others use too, `full_beside_sum` is the one to look at: both in turn, the least time of each.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <vector>

#include "tessera/methods/full.hpp"
#include "tessera/methods/snapkv.hpp"
#include "tessera/tessera.hpp"

namespace {

constexpr int tokens = 32768, kv_heads = 8, q_heads = 32, head_dim = 128, budget = 4096, layers = 2;

std::vector<float> random_values(std::size_t count) {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

/// A cache whose layers, decoded in turn, hold several times the last-level cache.
template <class Method>
struct filled {
  std::shared_ptr<tessera::cpu::executor> workers = std::make_shared<tessera::cpu::executor>();
  tessera::cache<Method> cache;
  int id;

  filled() : cache({layers, q_heads, kv_heads}, method(), workers), id(cache.open()) {
    const int chunk = 2048;
    const auto q = random_values(std::size_t(chunk) * q_heads * head_dim);
    const auto k = random_values(std::size_t(tokens) * kv_heads * head_dim);
    const auto v = random_values(std::size_t(tokens) * kv_heads * head_dim);
    for (int layer = 0; layer < layers; ++layer) {
      for (int first = 0; first < tokens; first += chunk) {
        const std::size_t at = std::size_t(first) * kv_heads * head_dim;
        cache.prefill(layer, id, tessera::nhd_rows(q.data(), chunk, q_heads, head_dim),
                      tessera::nhd_rows(k.data() + at, chunk, kv_heads, head_dim),
                      tessera::nhd_rows(v.data() + at, chunk, kv_heads, head_dim));
      }
    }
    cache.end_prefill(id);
  }

  static Method method() {
    Method method;
    method.set_budget(budget);
    return method;
  }
};

/// Attention of one query token over what the layers of a cache store, in turn.
template <template <class, int, int> class Method>
struct decode_run {
  static filled<Method<tessera::bf16, head_dim, head_dim>>& setup() {
    static filled<Method<tessera::bf16, head_dim, head_dim>> made;
    return made;
  }
  std::vector<float> q = random_values(std::size_t(q_heads) * head_dim), out = q;
  tessera::cpu::decode_workspace workspace;
  tessera::offset_t bytes = 0;
  int layer = 0;

  void operator()() {
    const tessera::index_t position = tokens - 1;
    const auto view = setup().cache.view(layer, setup().id);
    tessera::cpu::decode_attention(
        view,
        tessera::cpu::query_rows<float>{tessera::nhd_rows<const float>(q.data(), 1, q_heads, head_dim), &position}, {},
        nullptr, {tessera::nhd_rows(out.data(), 1, q_heads, head_dim), {}}, workspace, *setup().workers);
    benchmark::DoNotOptimize(out.data());
    bytes += tessera::offset_t(view.length(0, 0)) * kv_heads * 2 * head_dim * 2;
    layer = (layer + 1) % layers;
  }
};

/// Reads the same bytes as `full` with the same threads and adds them up.
struct sum_run {
  static constexpr std::size_t words = std::size_t(tokens) * kv_heads * head_dim;  // 32-bit words of K and V in bf16
  static constexpr int parts = 256;
  std::vector<std::uint32_t> data = std::vector<std::uint32_t>(words * layers, 12345);
  tessera::cpu::executor workers;
  std::vector<std::uint32_t> sums = std::vector<std::uint32_t>(parts);
  std::size_t layer = 0;

  void operator()() {
    workers.for_each(parts, [&](int part, int) {
      const std::uint32_t* from = data.data() + layer * words + words / parts * std::size_t(part);
      std::uint32_t total = 0;
      for (std::size_t i = 0; i < words / parts; ++i) total += from[i];
      sums[std::size_t(part)] = total;
    });
    benchmark::DoNotOptimize(sums.data());
    layer = (layer + 1) % layers;
  }
};

template <template <class, int, int> class Method>
void decode(benchmark::State& state) {
  decode_run<Method> run;
  run.setup();
  for (auto _ : state) run();
  state.SetBytesProcessed(run.bytes);
}

void plain_sum(benchmark::State& state) {
  sum_run run;
  for (auto _ : state) run();
  state.SetBytesProcessed(tessera::offset_t(state.iterations()) * tessera::offset_t(sum_run::words * 4));
}

/// `full` and the plain sum in turn; the least time of each, and how much of the sum's bandwidth `full` reaches.
void full_beside_sum(benchmark::State& state) {
  decode_run<tessera::full> full;
  sum_run sum;
  full.setup();
  double least_full = 1e9, least_sum = 1e9;
  const auto seconds = [](auto& run) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (auto _ : state) {
    least_full = std::min(least_full, seconds(full));
    least_sum = std::min(least_sum, seconds(sum));
  }
  state.counters["full_ms"] = least_full * 1e3;
  state.counters["sum_ms"] = least_sum * 1e3;
  state.counters["share"] = least_sum / least_full;
}

BENCHMARK(plain_sum)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(full_beside_sum)->UseRealTime()->Unit(benchmark::kMillisecond)->MinTime(3);
BENCHMARK(decode<tessera::full>)->Name("full")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode<tessera::snapkv>)->Name("snapkv_4096")->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
