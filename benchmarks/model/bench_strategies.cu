// How long the GPU takes to search the packing strategies of a prompt's segments; Llama-3.1-8B's heads, bf16.
//
//   bench_strategies [LAYERS] [TOKENS]   32 and 65536 unless given
//
// search   the bases of one segment of TOKENS tokens in every layer, without and with a search of its strategy
// prompt   the end of a prompt of TOKENS tokens, until the device is through: fixed and searched strategies
// Medians of five. Rows are random in directions that fall from channel to channel: no search ends early.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "cache_rows.cuh"
#include "tessera/backend/cuda/cache.cuh"
#include "tessera/methods/mosaickv.hpp"

namespace {

using namespace tessera;
using cache_bench::chunk_tokens, cache_bench::dim, cache_bench::kv_heads, cache_bench::q_heads;
using cache_bench::median;

using method = mosaickv<bf16, dim>;
using view_type = cuda::packed_view<kv_view<const bf16, dim>>;

/// Rows [kv_heads, tokens, dim] on the device.
cuda::device_buffer<bf16> falling_rows(index_t tokens) {
  std::vector<bf16> host(std::size_t(kv_heads) * std::size_t(tokens) * dim);
  std::uint32_t state = 12345;
  for (std::size_t i = 0; i < host.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    host[i] = bf16(float(int(state >> 16) - 32768) / 16384 * std::exp(-0.05f * float(i % dim)));
  }
  cuda::device_buffer<bf16> made(host.size());
  cuda::check(cudaMemcpy(made.data(), host.data(), made.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  return made;
}

class stopwatch {
 public:
  void start() {
    cuda::check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    begun_.record();
  }
  double milliseconds() {
    done_.record();
    return begun_.until(done_) / 1e3;
  }

 private:
  cache_bench::mark begun_, done_;
};

method recipe(bool searched) {
  method made;
  if (searched) made.layout.rows.strategy.strategy = strategy_choice::searched;
  return made;
}

double search_time(const cuda::device_buffer<bf16>& rows, index_t layers, index_t tokens, bool searched) {
  const auto layout = recipe(searched).layout;
  view_type view;
  view.whole.k = view.whole.v = rows.data();
  view.whole.k_strides = view.whole.v_strides = {0, offset_t(tokens) * dim, dim, 1};
  view.whole.sequences = 1, view.whole.kv_heads = kv_heads;
  host_vector<cuda::segment_span<view_type>> spans;
  for (index_t layer = 0; layer < layers; ++layer) spans.push_back({view, layer, 0, tokens});
  cuda::find_segment_bases<view_type> find(cuda::formats_of(layout, 8), cuda::limits_of(layout), kv_heads, layers,
                                           tokens, cuda::device_info::current());
  cuda::device_buffer<float> bases(std::size_t(layers) * std::size_t(find.segment_floats()));
  host_vector<segment_strategy> found;
  std::vector<double> times;
  stopwatch watch;
  for (int i = 0; i < 6; ++i) {
    watch.start();
    find.run(spans, bases.data(), found, nullptr);
    if (i > 0) times.push_back(watch.milliseconds());
  }
  if (searched)
    std::printf("         a strategy: %.3g of the channels, groups of %d, blocks of %d\n", double(found[0].channels),
                int(found[0].group), int(found[0].block));
  return median(times);
}

double prompt_time(const cuda::device_buffer<bf16>& rows, index_t layers, index_t tokens, bool searched) {
  cuda::cache_options sizes;
  sizes.sequences = 1, sizes.tokens = tokens + 64;
  cuda::cache<method> held(model_shape{layers, q_heads, kv_heads}, recipe(searched), sizes);
  const cuda::device_buffer<bf16> q(std::size_t(chunk_tokens) * q_heads * dim);
  std::vector<double> times;
  stopwatch watch;
  for (int i = 0; i < 6; ++i) {
    const index_t id = held.open(nullptr);
    for (index_t done = 0; done < tokens; done += chunk_tokens) {
      const index_t some = (std::min)(chunk_tokens, tokens - done);
      rows_view<const bf16> given{.data = rows.data() + offset_t(done) * dim,
                                  .token_stride = dim,
                                  .head_stride = offset_t(tokens) * dim,
                                  .tokens = some,
                                  .heads = kv_heads,
                                  .dim = dim};
      for (index_t layer = 0; layer < layers; ++layer)
        held.prefill(layer, id, nhd_rows<const bf16>(q.data(), some, q_heads, dim), given, given, nullptr);
    }
    watch.start();
    held.end_prefill(id, nullptr);
    if (i > 0) times.push_back(watch.milliseconds());
    held.close(id, nullptr);
  }
  return median(times);
}

}  // namespace

int main(int count, char** given) {
  const auto number = [&](int i, int otherwise) { return count > i ? std::atoi(given[i]) : otherwise; };
  const int layers = number(1, 32), tokens = number(2, 65536);
  if (layers < 1 || tokens < 1024 || tokens > 65536) {
    std::fprintf(stderr, "bench_strategies: expected at least one layer, and 1024 to 65536 tokens\n");
    return 2;
  }
  try {
    const auto rows = falling_rows(tokens);
    const double bases = search_time(rows, layers, tokens, false), all = search_time(rows, layers, tokens, true);
    std::printf("search   %d layers of %d tokens: bases %.2f ms, with a search %.2f ms\n", layers, tokens, bases, all);
    const double fixed = prompt_time(rows, layers, tokens, false), searched = prompt_time(rows, layers, tokens, true);
    std::printf("prompt   its end: fixed %.2f ms, searched %.2f ms\n", fixed, searched);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "bench_strategies: %s\n", problem.what());
    return 1;
  }
}
