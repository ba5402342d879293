// Device memory with an owner, scratch that is allocated when needed, and copies of device memory.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../../core/types.hpp"
#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Where device memory comes from. `allocate` returns memory aligned to 256 bytes, or null if it has none left.
struct memory_source {
  void* (*allocate)(void* context, std::size_t bytes);
  void (*release)(void* context, void* data, std::size_t bytes);
  void* context = nullptr;
};

namespace detail {

inline void* allocate_by_cuda(void*, std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // clears the error, so that the next call does not report it
    return nullptr;
  }
  check(status, "cudaMalloc");
  return data;
}
inline void release_by_cuda(void*, void* data, std::size_t) { cudaFree(data); }

inline memory_source& memory_source_of_thread() {
  thread_local memory_source source{allocate_by_cuda, release_by_cuda};
  return source;
}

}  // namespace detail

/// While it lives, this thread's calls take device memory from `source`, for example an engine's allocator. Construct a
/// cache, or set its budget, while one lives. Memory returns to the source that it came from, so the source must
/// outlive the caches.
class allocate_from {
 public:
  explicit allocate_from(const memory_source& source)
      : previous_(std::exchange(detail::memory_source_of_thread(), source)) {}
  allocate_from(const allocate_from&) = delete;
  allocate_from& operator=(const allocate_from&) = delete;
  ~allocate_from() { detail::memory_source_of_thread() = previous_; }

 private:
  memory_source previous_;
};

/// Device memory with one owner; a copy copies the contents. Errors: not enough memory; the message has the requested
/// and the free number of bytes.
template <class T>
class device_buffer {
 public:
  device_buffer() = default;
  explicit device_buffer(std::size_t count) : count_(count), source_(detail::memory_source_of_thread()) {
    if (count == 0) return;
    allocate();
    try {
      check(cudaMemset(data_, 0, bytes()), "cudaMemset");
      check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // streams of the caller's need not wait for it
    } catch (...) {
      source_.release(source_.context, data_, bytes());
      throw;
    }
  }
  device_buffer(const device_buffer& other) : device_buffer(other.count_) {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // any stream may be writing the other's memory
    if (count_ > 0) check(cudaMemcpy(data_, other.data_, bytes(), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  device_buffer(device_buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)), source_(other.source_) {}
  device_buffer& operator=(device_buffer other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    std::swap(source_, other.source_);
    return *this;
  }
  ~device_buffer() {
    if (data_) source_.release(source_.context, data_, bytes());
  }
  /// Memory that is not initialised. No stream is waited for.
  static device_buffer not_cleared(std::size_t count) {
    device_buffer made;
    made.count_ = count;
    if (count > 0) made.allocate();
    return made;
  }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

 private:
  void allocate() {
    data_ = static_cast<T*>(source_.allocate(source_.context, bytes()));
    if (data_) return;
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    fail("device memory", std::to_string((bytes() >> 20) + 1) + " MiB more",
         "the " + std::to_string(free >> 20) + " MiB that are free of " + std::to_string(total >> 20),
         "lower tokens, sequences or rows of the cache, or free memory on the device");
  }

  T* data_ = nullptr;
  std::size_t count_ = 0;
  memory_source source_ = detail::memory_source_of_thread();
};

/// Scratch that is allocated when it is first needed. A copy of its owner allocates scratch of its own.
template <class T>
class made_on_demand {
 public:
  made_on_demand() = default;
  made_on_demand(const made_on_demand&) {}
  made_on_demand(made_on_demand&&) noexcept = default;
  made_on_demand& operator=(made_on_demand other) noexcept {
    value_ = std::move(other.value_);
    return *this;
  }
  template <class... Arguments>
  void make(const Arguments&... arguments) {
    value_ = std::make_unique<T>(arguments...);
  }
  explicit operator bool() const { return bool(value_); }
  T& operator*() const { return *value_; }

 private:
  std::unique_ptr<T> value_;
};

/// A host copy of what the device holds once all its work is done.
template <class T>
std::vector<T> downloaded(const T* from, std::size_t count) {
  std::vector<T> host(count);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return host;
}

/// Enqueues a copy from device memory to device memory.
template <class T>
void copy_on_device(T* to, const T* from, std::size_t count, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
