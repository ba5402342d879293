// Device buffers, random data and captured graphs for the GPU tests, and a reason to skip where there is no GPU.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "catch.hpp"
#include "support/random.hpp"
#include "tessera/backend/cuda/device/tuning.cuh"
#include "tessera/core/types.hpp"

namespace gpu_test {
using namespace tessera;

/// `full` times TESSERA_TEST_SCALE, at least `least`: sanitizers run few cases, on short rows.
inline int scaled(int full, int least = 1) { return std::max(std::min(least, full), int(support::scaled(full))); }

/// `full`, or as much less as TESSERA_TEST_SCALE is below 1, at least `least`: sizes, which a larger scale leaves alone.
inline int shrunk(int full, int least) { return std::min(full, scaled(full, least)); }

/// That fraction of the choices, at least `least`, spread over them from the first to the last.
template <class T>
std::vector<T> scaled(const std::vector<T>& all, int least) {
  const int last = int(all.size()) - 1, count = scaled(int(all.size()), std::max(least, 2));
  std::vector<T> some;
  for (int i = 0; i < count; ++i) some.push_back(all[std::size_t(i * last / (count - 1))]);
  return some;
}

/// 0, 1, ... for `scaled` to draw from.
inline std::vector<int> cases(int count) {
  std::vector<int> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

template <class T>
struct buffer {
  T* data = nullptr;
  std::size_t count;
  explicit buffer(std::size_t n) : count(n) {
    cuda::check(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)), "cudaMalloc");
  }
  explicit buffer(const std::vector<T>& host) : buffer(host.size()) { set(host); }
  buffer(const buffer&) = delete;
  ~buffer() { cudaFree(data); }
  void set(const std::vector<T>& host) {
    cuda::check(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void fill(int byte) { cuda::check(cudaMemset(data, byte, count * sizeof(T)), "cudaMemset"); }
  std::vector<T> get() const {
    std::vector<T> host(count);
    cuda::check(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
};

/// A captured stream: `graph g(stream, [&] { op.run(...); }); g.launch();`
struct graph {
  cudaStream_t stream;
  cudaGraph_t captured{};
  cudaGraphExec_t ready{};
  template <class F>
  graph(cudaStream_t s, F&& record) : stream(s) {
    cuda::check(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    record();
    cuda::check(cudaStreamEndCapture(s, &captured), "cudaStreamEndCapture");
    cuda::check(cudaGraphInstantiate(&ready, captured, 0), "cudaGraphInstantiate");
  }
  ~graph() {
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(captured);
  }
  std::size_t nodes() const {
    std::size_t count = 0;
    cuda::check(cudaGraphGetNodes(captured, nullptr, &count), "cudaGraphGetNodes");
    return count;
  }
  void launch() {
    cuda::check(cudaGraphLaunch(ready, stream), "cudaGraphLaunch");
    cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
};

inline bool gpu_missing() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) return false;
  WARN("skipped: no CUDA device on this machine");
  return true;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline std::mt19937& rng() {
  static std::mt19937 engine(20261120 + support::more_seed());
  return engine;
}
inline int draw(int low, int high, std::mt19937& engine = rng()) {
  return std::uniform_int_distribution<int>(low, high)(engine);
}

template <class T>
std::vector<T> normal(std::size_t n, float scale = 1) {
  std::normal_distribution<float> normal_of(0, scale);
  std::vector<T> values(n);
  for (auto& value : values) value = T(normal_of(rng()));
  return values;
}

/// Scores of many sorts: 0 normal, 1 a handful of values, 2 all equal, 3 specials among normals, 4 tiny positives as
/// softmax leaves them, 5 bit patterns, 6 near-equal values that differ in the lowest bits, 7 all NaN or -infinity.
template <class Rng>
float score(int kind, Rng& rng) {
  std::normal_distribution<float> normal;
  switch (kind) {
    case 0:
      return normal(rng);
    case 1:
      return float(int(rng() % 5)) - 2;
    case 2:
      return 0.25f;
    case 3: {
      const float special[] = {0.0f, -0.0f, infinity, -infinity, NAN, -NAN, 1e-42f, -1e-42f};
      return rng() % 2 ? special[rng() % 8] : normal(rng);
    }
    case 4:
      return std::exp(normal(rng) * 4 - 12);
    case 5:
      return bits_as<float>(std::uint32_t(rng()));
    case 6:
      return bits_as<float>(0x3f800000u + std::uint32_t(rng() % 700));
    case 8:
      return 20 + normal(rng);  // one magnitude
    default:
      return rng() % 2 ? float(NAN) : -infinity;
  }
}
}  // namespace gpu_test
