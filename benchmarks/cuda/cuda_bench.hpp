// What the GPU benchmarks share: memory, random inputs, and times of captured graphs.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tessera/backend/cuda/device/tuning.cuh"
#include "tessera/core/types.hpp"
#include "tessera/core/views.hpp"

namespace gpu_bench {

using namespace tessera;

// The shapes of the figures: Llama-3.1-8B, one layer.
inline constexpr index_t kv_heads = 8, q_heads = 32, head_dim = 128;

template <class T>
class buffer {
 public:
  // Not explicit: a struct of buffers is made from a list of sizes and vectors.
  buffer(std::size_t count) : count_(count) {
    cuda::check(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
  }
  buffer(const std::vector<T>& host) : buffer(host.size()) {
    cuda::check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  ~buffer() { cudaFree(data_); }
  T* data() const { return data_; }
  std::size_t count() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

/// Memory that benchmarks take turns with, filled with normal random numbers; it grows to the largest request.
/// Benchmarks may write into it: what they write is rows of it, or of other random data.
bf16* random_rows(std::size_t count);

enum class score_kind { normal, softmax };  ///< softmax: exp of a normal number, positive and far apart
void fill_scores(float* scores, std::size_t count, score_kind kind);

cudaStream_t stream();

/// How many sets of inputs of so many bytes take turns: together at least 256 MiB, four times the L2 of an H200.
inline int input_sets(double bytes) { return std::max(2, int(std::min(256.0, (256 << 20) / bytes + 0.999))); }

/// Launches in one graph: whole rounds over the sets, and at least 32 where a launch is short. peers.py counts alike.
inline int launches(double bytes, int sets) {
  const int least = bytes < (64 << 20) ? 32 : 4;
  return (least + sets - 1) / sets * sets;
}

/// A captured graph of equal launches.
class replay {
 public:
  /// Captures `launch(i)` for i < count, and replays it twice to warm up.
  template <class Launch>
  replay(int count, const Launch& launch) : count_(count) {
    cuda::check(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    cudaGraph_t captured{};
    try {
      for (int i = 0; i < count; ++i) launch(i);
    } catch (...) {  // the stream goes on to the next benchmark
      cudaStreamEndCapture(stream(), &captured);
      cudaGraphDestroy(captured);
      cudaGetLastError();
      throw;
    }
    cuda::check(cudaStreamEndCapture(stream(), &captured), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiate(&ready_, captured, 0);
    cudaGraphDestroy(captured);
    cuda::check(made, "cudaGraphInstantiate");
    cuda::check(cudaEventCreate(&begin_), "cudaEventCreate");
    cuda::check(cudaEventCreate(&end_), "cudaEventCreate");
    for (int i = 0; i < 2; ++i) seconds();
  }
  replay(const replay&) = delete;
  replay& operator=(const replay&) = delete;
  ~replay() {
    cudaGraphExecDestroy(ready_);
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }

  /// Of one launch, by events around a replay.
  double seconds();

 private:
  int count_;
  cudaGraphExec_t ready_{};
  cudaEvent_t begin_{}, end_{};
};

/// One benchmark, ready to run.
struct prepared {
  std::unique_ptr<replay> graph;
  double bytes = 0;            ///< that a launch must read and write
  double flops = 0;            ///< that a launch must do, where they and not the bytes are the limit
  std::shared_ptr<void> keep;  ///< the buffers behind the graph
};

/// Registers a benchmark under `name`. `make` runs when its turn comes, after the previous benchmark has been freed.
void add(const std::string& name, std::function<prepared()> make, int iterations = 3);

/// Writes what a cache of ragged pages holds behind its flat page table, a query, and the attention that ours gives of it, into a
/// folder that is there: benchmarks/peers/flashinfer_table.py reads the same table with another kernel.
void write_flat_table(const std::string& folder);

/// Random ascending indices below `count`, all different, in runs of `run`.
std::vector<index_t> random_subset(index_t count, index_t chosen, index_t run, std::mt19937& random);

}  // namespace gpu_bench
