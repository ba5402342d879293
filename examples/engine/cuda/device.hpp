// The CUDA runtime with owners and errors that explain themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <tessera/core/types.hpp>
#include <utility>

namespace engine::cuda {

using tessera::bf16;

/// Throws tessera::error with the call and the driver's reason unless it succeeded.
void check(cudaError_t status, const char* call);

/// Errors: no CUDA device, no driver, or a device older than compute capability 8.0.
void require_device();

/// Uninitialised memory on the device. Errors: too little is free.
void* allocate(std::size_t bytes);

/// An array on the device with one owner.
template <class T>
class device_array {
 public:
  device_array() = default;
  explicit device_array(std::size_t count) : data_(static_cast<T*>(allocate(count * sizeof(T)))), count_(count) {}
  device_array(device_array&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  device_array& operator=(device_array other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~device_array() { cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

/// A stream of its own. It waits for the legacy default stream, where caches clear fresh memory.
class stream {
 public:
  stream() { check(cudaStreamCreate(&stream_), "cudaStreamCreate"); }
  stream(const stream&) = delete;
  ~stream() { cudaStreamDestroy(stream_); }

  operator cudaStream_t() const { return stream_; }
  void wait() const { check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Host memory that the device copies from and to by itself, for a few values.
template <class T>
class pinned_array {
 public:
  explicit pinned_array(std::size_t count) {
    check(cudaMallocHost(reinterpret_cast<void**>(&data_), count * sizeof(T)), "cudaMallocHost");
  }
  pinned_array(const pinned_array&) = delete;
  ~pinned_array() { cudaFreeHost(data_); }
  T* data() const { return data_; }

 private:
  T* data_ = nullptr;
};

}  // namespace engine::cuda
