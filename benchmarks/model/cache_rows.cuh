// What benchmarks of a cache alone share: Llama-3.1-8B's heads, rows for its calls, medians.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tessera/backend/cuda/device/memory.cuh"

namespace cache_bench {

using tessera::bf16, tessera::index_t;
namespace cuda = tessera::cuda;

inline constexpr index_t q_heads = 32, kv_heads = 8, dim = 128, chunk_tokens = 2048;

/// Rows that every call reads, and its outputs.
struct rows {
  cuda::device_buffer<bf16> q, k, out;
  rows()
      : q(std::size_t(chunk_tokens) * q_heads * dim),
        k(std::size_t(chunk_tokens) * kv_heads * dim),
        out(std::size_t(chunk_tokens) * q_heads * dim) {
    for (auto* buffer : {&q, &k}) {
      std::vector<bf16> host(buffer->size());
      std::uint32_t state = 12345;
      for (bf16& x : host) {
        state = state * 1664525u + 1013904223u;
        x = bf16(float(int(state >> 16) - 32768) / 16384);
      }
      cuda::check(cudaMemcpy(buffer->data(), host.data(), host.size() * sizeof(bf16), cudaMemcpyHostToDevice),
                  "cudaMemcpy");
    }
  }
};

/// A moment of the default stream. `until` gives microseconds.
struct mark {
  cudaEvent_t event = nullptr;
  mark() { cuda::check(cudaEventCreate(&event), "cudaEventCreate"); }
  ~mark() { cudaEventDestroy(event); }
  void record() { cuda::check(cudaEventRecord(event, nullptr), "cudaEventRecord"); }
  double until(const mark& later) const {
    float ms = 0;
    cuda::check(cudaEventSynchronize(later.event), "cudaEventSynchronize");
    cuda::check(cudaEventElapsedTime(&ms, event, later.event), "cudaEventElapsedTime");
    return 1e3 * double(ms);
  }
};

inline double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

}  // namespace cache_bench
