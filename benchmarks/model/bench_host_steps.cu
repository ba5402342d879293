// What a decode step of a batch costs the host, of Llama-3.1-8B's shape: with a step that is recorded and replayed, and without. bf16.
//
//   bench_host_steps [SEQUENCES] [PROMPT] [LAYERS] [STEPS]        64, 1024, 32 and 512 unless given; at most 1,024 and 2,048
//
// prepare   prepare_step, all that a recorded step asks of the host beside its launch: lengths, pages that rows need, tables; median, mean and most
// record    the calls of a step that is not recorded: begin_step and decode of every layer, until the host has them back
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <vector>

#include "cache_rows.cuh"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/layout/dense_rows.hpp"
#include "tessera/layout/fixed_pages.hpp"
#include "tessera/layout/stored.hpp"
#include "tessera/methods/full.hpp"
#include "tessera/methods/tangram.hpp"

namespace {

using namespace tessera;

using cache_bench::dim, cache_bench::kv_heads, cache_bench::q_heads, cache_bench::median;

using clock = std::chrono::steady_clock;
double elapsed_us(clock::time_point begun) {
  return std::chrono::duration<double, std::micro>(clock::now() - begun).count();
}
void wait() { cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

/// Shares of a layer's heads, other ones in every layer.
std::vector<double> uneven_shares(index_t layers) {
  std::vector<double> shares;
  for (index_t i = 0; i < layers * kv_heads; ++i) shares.push_back(0.1 + 0.05 * double(i * 7 % 17));
  return shares;
}

template <class Method>
void measure(const char* name, Method method, index_t sequences, index_t prompt, index_t layers, index_t steps) {
  const cache_bench::rows given;
  const std::vector<double> shares = uneven_shares(layers);
  if constexpr (requires { method.retain.budget.shares; })
    method.retain.budget.shares = {shares.data(), layers, kv_heads};
  cuda::cache_options sizes;
  sizes.sequences = sequences;
  sizes.tokens = prompt + steps + 16;
  cuda::cache<Method, bf16> kv(model_shape{layers, q_heads, kv_heads}, method, sizes);
  const auto part = [&](const cuda::device_buffer<bf16>& all, index_t heads, index_t tokens, index_t batch = 1) {
    return nhd_rows(all.data(), tokens, heads, dim, batch);
  };
  std::vector<index_t> ids;
  for (index_t i = 0; i < sequences; ++i) {
    const index_t id = kv.open(nullptr);
    kv.announce(id, prompt);
    for (index_t layer = 0; layer < layers; ++layer)
      kv.prefill(layer, id, part(given.q, q_heads, prompt), part(given.k, kv_heads, prompt),
                 part(given.k, kv_heads, prompt), nullptr);
    kv.end_prefill(id, nullptr);
    ids.push_back(id);
  }
  wait();
  std::vector<double> prepare, record;
  for (index_t i = 0; i < steps; ++i) {
    const auto begun = clock::now();
    const batch now = kv.prepare_step(ids, 1, nullptr);
    prepare.push_back(elapsed_us(begun));
    const auto called = clock::now();
    kv.begin_step(now, nullptr);
    for (index_t layer = 0; layer < layers; ++layer)
      kv.decode(layer, now, part(given.q, q_heads, 1, sequences), part(given.k, kv_heads, 1, sequences),
                part(given.k, kv_heads, 1, sequences), part(given.out, q_heads, 1, sequences), {}, nullptr);
    record.push_back(elapsed_us(called));
    wait();
  }
  const double mean = std::accumulate(prepare.begin(), prepare.end(), 0.0) / double(prepare.size());
  std::printf("%-22s prepare %7.1f us, mean %7.1f, most %7.1f; record %8.1f us\n", name, median(prepare), mean,
              *std::max_element(prepare.begin(), prepare.end()), median(record));
}

}  // namespace

int main(int argc, char** argv) try {
  const auto number = [&](int at, int otherwise) { return argc > at ? std::max(1, std::atoi(argv[at])) : otherwise; };
  const index_t sequences = std::min<index_t>(number(1, 64), 1024),
                prompt = std::min<index_t>(number(2, 1024), cache_bench::chunk_tokens), layers = number(3, 32),
                steps = number(4, 512);
  std::printf("%d sequences, prompts of %d tokens, %d layers, %d steps; host us a step\n", int(sequences), int(prompt),
              int(layers), int(steps));
  measure("full", full<bf16, dim>{}, sequences, prompt, layers, steps);
  measure("full, fixed pages", full<bf16, dim, dim, stored<dense_rows<bf16, dim>, fixed_pages<16>>>{}, sequences,
          prompt, layers, steps);
  measure("tangram, ragged pages", tangram<bf16, dim>{}, sequences, prompt, layers, steps);
  return 0;
} catch (const std::exception& problem) {
  std::fprintf(stderr, "bench_host_steps: %s\n", problem.what());
  return 1;
}
