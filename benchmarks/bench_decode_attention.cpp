// CPU decode attention over 32,768 tokens: `full` against `snapkv` at 4,096, and `full` against the read bandwidth that
// a plain sum over the same bytes reaches with the same threads. Ratios count; absolute times hold for one machine
// only.
#include <benchmark/benchmark.h>

#include <cstring>
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

/// Attention of one query token over what a layer of the cache stores.
template <template <class, int, int> class Method>
void decode(benchmark::State& state) {
  static filled<Method<tessera::bf16, head_dim, head_dim>> setup;
  const auto q = random_values(std::size_t(q_heads) * head_dim);
  std::vector<float> out(q.size());
  const tessera::index_t position = tokens - 1;
  tessera::cpu::decode_workspace workspace;
  tessera::offset_t bytes = 0;
  int layer = 0;
  for (auto _ : state) {
    const auto view = setup.cache.view(layer, setup.id);
    tessera::cpu::decode_attention(
        view, tessera::cpu::query_rows<float>{tessera::nhd_rows(q.data(), 1, q_heads, head_dim), &position}, {},
        nullptr, {tessera::nhd_rows(out.data(), 1, q_heads, head_dim), {}}, workspace, *setup.workers);
    benchmark::DoNotOptimize(out.data());
    bytes += tessera::offset_t(view.length(0, 0)) * kv_heads * 2 * head_dim * 2;
    layer = (layer + 1) % layers;
  }
  state.SetBytesProcessed(bytes);
}

/// Reads the same bytes as `full` with the same threads and adds them up.
void plain_sum(benchmark::State& state) {
  constexpr std::size_t words = std::size_t(tokens) * kv_heads * head_dim;  // 32-bit words of K and V in bf16
  static const std::vector<std::uint32_t> data(words * layers, 12345);
  tessera::cpu::executor workers;
  constexpr int parts = 256;
  std::vector<std::uint32_t> sums(parts);
  std::size_t layer = 0;
  for (auto _ : state) {
    workers.for_each(parts, [&](int part, int) {
      const std::uint32_t* from = data.data() + layer * words + words / parts * std::size_t(part);
      std::uint32_t total = 0;
      for (std::size_t i = 0; i < words / parts; ++i) total += from[i];
      sums[std::size_t(part)] = total;
    });
    benchmark::DoNotOptimize(sums.data());
    layer = (layer + 1) % layers;
  }
  state.SetBytesProcessed(tessera::offset_t(state.iterations()) * tessera::offset_t(words * 4));
}

BENCHMARK(plain_sum)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode<tessera::full>)->Name("full")->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode<tessera::snapkv>)->Name("snapkv_4096")->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
