// The GPU benchmarks' main function, their inputs and their timing; and the ceilings that every figure is compared with.
//
//   bench_cuda --benchmark_out=FILE --benchmark_out_format=json [--benchmark_filter=REGEX]
//
// Times are manual: events around a replay of a captured graph, divided by its launches. Each benchmark takes 11
// repetitions; medians count. Inputs are rotated through at least 256 MiB, unless one set of them is larger.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "cuda_bench.hpp"

namespace gpu_bench {
namespace {

__device__ float normal_number(std::size_t i, unsigned seed) {
  unsigned bits[2];
  for (unsigned j = 0; j < 2; ++j) {
    unsigned x = unsigned(i) * 2654435761u + unsigned(i >> 32) * 40503u + seed * 2 + j * 0x9e3779b9u;
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    bits[j] = x;
  }
  const float radius = sqrtf(-2 * __logf((float(bits[0] >> 8) + 0.5f) / 16777216.0f));
  return radius * __cosf(6.2831853f * (float(bits[1] >> 8) / 16777216.0f));
}

__global__ void __launch_bounds__(256) fill_rows_entry(bf16* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * std::size_t(256) + threadIdx.x; i < count; i += gridDim.x * std::size_t(256))
    to[i] = bf16(normal_number(i, 1));
}

__global__ void __launch_bounds__(256) fill_scores_entry(float* to, std::size_t count, bool softmax) {
  for (std::size_t i = blockIdx.x * std::size_t(256) + threadIdx.x; i < count; i += gridDim.x * std::size_t(256)) {
    const float value = normal_number(i, 7);
    to[i] = softmax ? __expf(4 * value - 12) : value;
  }
}

/// Holds the stream until the host has queued what is to be timed.
__global__ void spin_entry(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

constexpr int read_threads = 512, read_each = 4;

__global__ void __launch_bounds__(read_threads) read_entry(const uint4* from, std::size_t count, unsigned* never) {
  unsigned sum = 0;
  const std::size_t step = gridDim.x * std::size_t(read_threads);
  for (std::size_t i = blockIdx.x * std::size_t(read_threads) + threadIdx.x; i < count; i += step * read_each) {
    uint4 value[read_each];
#pragma unroll
    for (int j = 0; j < read_each; ++j) value[j] = i + j * step < count ? __ldcs(from + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < read_each; ++j) sum += value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  if (sum == 12345 && never) *never = sum;  // keeps the loads; the pointer is null
}

prepared plain_read(std::size_t bytes) {
  const int sets = input_sets(double(bytes));
  const bf16* rows = random_rows(bytes / 2 * std::size_t(sets));
  const int blocks = cuda::device_info::current().multiprocessors * 4;
  prepared made;
  made.bytes = double(bytes);
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const auto* from = reinterpret_cast<const uint4*>(rows + std::size_t(i % sets) * (bytes / 2));
    read_entry<<<blocks, read_threads, 0, stream()>>>(from, bytes / 16, nullptr);
  });
  return made;
}

constexpr std::size_t piece = 4096 / sizeof(uint4);  // a page of 16 tokens of one head

/// As read_entry, pieces of 4 KiB in the order that `order` says.
__global__ void __launch_bounds__(read_threads)
    read_pieces_entry(const uint4* from, std::size_t count, const index_t* order, unsigned* never) {
  unsigned sum = 0;
  const std::size_t step = gridDim.x * std::size_t(read_threads);
  for (std::size_t i = blockIdx.x * std::size_t(read_threads) + threadIdx.x; i < count; i += step * read_each) {
    uint4 value[read_each];
#pragma unroll
    for (int j = 0; j < read_each; ++j) {
      const std::size_t at = i + j * step;
      value[j] = at < count ? __ldcs(from + std::size_t(order[at / piece]) * piece + at % piece) : uint4{};
    }
#pragma unroll
    for (int j = 0; j < read_each; ++j) sum += value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  if (sum == 12345 && never) *never = sum;
}

/// What the order of pages costs whoever reads them: the same loads behind the same table, shuffled or not.
prepared read_pieces(std::size_t bytes, bool shuffled) {
  const int sets = input_sets(double(bytes));
  const bf16* rows = random_rows(bytes / 2 * std::size_t(sets));
  const int blocks = cuda::device_info::current().multiprocessors * 4;
  std::vector<index_t> order(bytes / 4096);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = index_t(i);
  std::mt19937 random(3);
  if (shuffled) std::shuffle(order.begin(), order.end(), random);
  const auto table = std::make_shared<buffer<index_t>>(order);
  prepared made;
  made.bytes = double(bytes);
  made.keep = table;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const auto* from = reinterpret_cast<const uint4*>(rows + std::size_t(i % sets) * (bytes / 2));
    read_pieces_entry<<<blocks, read_threads, 0, stream()>>>(from, bytes / 16, table->data(), nullptr);
  });
  return made;
}

__global__ void __launch_bounds__(read_threads) copy_entry(const uint4* from, uint4* to, std::size_t count) {
  const std::size_t step = gridDim.x * std::size_t(read_threads);
  for (std::size_t i = blockIdx.x * std::size_t(read_threads) + threadIdx.x; i < count; i += step * read_each) {
    uint4 value[read_each];
#pragma unroll
    for (int j = 0; j < read_each; ++j) value[j] = i + j * step < count ? __ldcs(from + i + j * step) : uint4{};
#pragma unroll
    for (int j = 0; j < read_each; ++j) {
      if (i + j * step < count) __stcs(to + i + j * step, value[j]);
    }
  }
}

/// By a kernel, or by cudaMemcpyAsync: the faster of the two is the ceiling of what reads and writes.
prepared device_copy(std::size_t bytes, bool by_kernel) {
  const int sets = input_sets(double(bytes));
  const bf16* rows = random_rows(bytes / 2 * std::size_t(sets));
  const auto target = std::make_shared<buffer<unsigned char>>(bytes * std::size_t(sets));
  const int blocks = cuda::device_info::current().multiprocessors * 4;
  prepared made;
  made.bytes = 2.0 * double(bytes);
  made.keep = target;
  made.graph = std::make_unique<replay>(launches(made.bytes, sets), [&](int i) {
    const std::size_t at = std::size_t(i % sets) * bytes;
    const bf16* from = rows + at / 2;
    unsigned char* to = target->data() + at;
    if (by_kernel) {
      copy_entry<<<blocks, read_threads, 0, stream()>>>(reinterpret_cast<const uint4*>(from),
                                                        reinterpret_cast<uint4*>(to), bytes / 16);
    } else {
      cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()), "cudaMemcpyAsync");
    }
  });
  return made;
}

__global__ void empty_entry() {}

prepared empty_kernel() {
  prepared made;
  made.graph = std::make_unique<replay>(256, [](int) { empty_entry<<<1, 32, 0, stream()>>>(); });
  return made;
}

const int registered = [] {
  add("empty_kernel", empty_kernel);
  add("read/32MiB", [] { return plain_read(std::size_t(32) << 20); });
  add("read/128MiB", [] { return plain_read(std::size_t(128) << 20); });
  add("read/256MiB", [] { return plain_read(std::size_t(256) << 20); });
  add("read/4GiB", [] { return plain_read(std::size_t(4) << 30); });
  add("read_pieces/in_order/4GiB", [] { return read_pieces(std::size_t(4) << 30, false); });
  add("read_pieces/shuffled/4GiB", [] { return read_pieces(std::size_t(4) << 30, true); });
  add("copy/128MiB", [] { return device_copy(std::size_t(128) << 20, true); });
  add("copy/4GiB", [] { return device_copy(std::size_t(4) << 30, true); });
  add("memcpy/128MiB", [] { return device_copy(std::size_t(128) << 20, false); });
  add("memcpy/4GiB", [] { return device_copy(std::size_t(4) << 30, false); });
  return 0;
}();

/// The benchmark that is set up now; repetitions of one benchmark share it.
struct {
  std::string name;
  std::optional<prepared> ready;
} current;

void run(benchmark::State& state, const std::string& name, const std::function<prepared()>& make) {
  try {
    if (current.name != name) {
      current.ready.reset();
      current.name.clear();
      current.ready = make();
      current.name = name;
    }
    for (auto _ : state) state.SetIterationTime(current.ready->graph->seconds());
    using benchmark::Counter;
    const auto per_second = [](double amount) { return Counter(amount, Counter::kIsIterationInvariantRate); };
    if (current.ready->bytes > 0) {
      state.counters["bytes"] = current.ready->bytes;
      state.counters["GB/s"] = per_second(current.ready->bytes / 1e9);
    }
    if (current.ready->flops > 0) state.counters["TFLOP/s"] = per_second(current.ready->flops / 1e12);
  } catch (const std::exception& failure) {
    state.SkipWithError(failure.what());
  }
}

}  // namespace

cudaStream_t stream() {
  static const cudaStream_t made = [] {
    cudaStream_t created{};
    cuda::check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return created;
  }();
  return made;
}

bf16* random_rows(std::size_t count) {
  static std::unique_ptr<buffer<bf16>> rows;
  if (!rows || rows->count() < count) {
    rows.reset();
    rows = std::make_unique<buffer<bf16>>(count);
    fill_rows_entry<<<2048, 256, 0, stream()>>>(rows->data(), count);
    cuda::check(cudaStreamSynchronize(stream()), "filling random rows");
  }
  return rows->data();
}

void fill_scores(float* scores, std::size_t count, score_kind kind) {
  fill_scores_entry<<<2048, 256, 0, stream()>>>(scores, count, kind == score_kind::softmax);
  cuda::check(cudaStreamSynchronize(stream()), "filling scores");
}

double replay::seconds() {
  spin_entry<<<1, 1, 0, stream()>>>(100000);
  cuda::check(cudaEventRecord(begin_, stream()), "cudaEventRecord");
  cuda::check(cudaGraphLaunch(ready_, stream()), "cudaGraphLaunch");
  cuda::check(cudaEventRecord(end_, stream()), "cudaEventRecord");
  cuda::check(cudaEventSynchronize(end_), "cudaEventSynchronize");
  float milliseconds = 0;
  cuda::check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
  return double(milliseconds) / 1000 / count_;
}

void add(const std::string& name, std::function<prepared()> make, int iterations) {
  const auto least = [](const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); };
  const auto most = [](const std::vector<double>& v) { return *std::max_element(v.begin(), v.end()); };
  // Quick: each launch is seen to work, and not timed.
  const bool quick = std::getenv("TESSERA_BENCH_QUICK") != nullptr;
  benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { run(state, name, make); })
      ->UseManualTime()
      ->Iterations(quick ? 1 : iterations)
      ->Repetitions(quick ? 1 : 11)
      ->ReportAggregatesOnly(true)
      ->ComputeStatistics("min", least)
      ->ComputeStatistics("max", most)
      ->Unit(benchmark::kMicrosecond);
}

std::vector<index_t> random_subset(index_t count, index_t chosen, index_t run, std::mt19937& random) {
  std::uniform_int_distribution<index_t> draw(0, count / run - 1);
  std::vector<index_t> runs, all;
  while (index_t(runs.size()) < chosen / run) {
    for (index_t i = index_t(runs.size()); i < chosen / run; ++i) runs.push_back(draw(random));
    std::sort(runs.begin(), runs.end());
    runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
  }
  for (const index_t first : runs) {
    for (index_t i = 0; i < run; ++i) all.push_back(first * run + i);
  }
  return all;
}

}  // namespace gpu_bench

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "--flat_table") {
    try {
      gpu_bench::write_flat_table(argv[2]);
      return 0;
    } catch (const std::exception& failure) {
      std::fprintf(stderr, "bench_cuda: %s\n", failure.what());
      return 2;
    }
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  int device = 0, driver = 0, runtime = 0;
  cudaDeviceProp properties{};
  try {
    tessera::cuda::device_info::current();
    tessera::cuda::check(cudaGetDevice(&device), "cudaGetDevice");
    tessera::cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "bench_cuda needs a CUDA device: %s\n", failure.what());
    return 2;
  }
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  benchmark::AddCustomContext("gpu", properties.name);
  benchmark::AddCustomContext("multiprocessors", std::to_string(properties.multiProcessorCount));
  benchmark::AddCustomContext("l2_bytes", std::to_string(properties.l2CacheSize));
  benchmark::AddCustomContext("cuda_driver", version(driver));
  benchmark::AddCustomContext("cuda_runtime", version(runtime));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
