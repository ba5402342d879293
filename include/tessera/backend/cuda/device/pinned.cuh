// Page-locked memory of the host, which kernels write to without anybody waiting, and marks on a stream.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "../../../core/host/host_vector.hpp"
#include "check.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Page-locked memory, zeroed, with one owner. The device writes to it over the bus as to its own memory.
/// Errors   no memory: tessera::error.   Cost  some 0.3 ms a MiB to make: see `row_blocks`.
template <class T>
class pinned_buffer {
 public:
  pinned_buffer() = default;
  explicit pinned_buffer(std::size_t count) : count_(count) {
    if (count == 0) return;
    void* data = nullptr;
    check(cudaHostAlloc(&data, count * sizeof(T), cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(data, 0, count * sizeof(T));
    data_ = static_cast<T*>(data);
  }
  pinned_buffer(const pinned_buffer& other) : pinned_buffer(other.count_) {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // whatever stream fills the other
    if (count_ > 0) std::memcpy(data_, other.data_, count_ * sizeof(T));
  }
  pinned_buffer(pinned_buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  pinned_buffer& operator=(pinned_buffer other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~pinned_buffer() {
    if (data_) cudaFreeHost(data_);
  }
  T* data() const { return data_; }
  std::size_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

/// A point on a stream. Any thread may wait for it. A copy is another mark, which was never set.
class stream_mark {
 public:
  stream_mark() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  stream_mark(const stream_mark&) : stream_mark() {}
  stream_mark(stream_mark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  stream_mark& operator=(stream_mark other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~stream_mark() {
    if (event_) cudaEventDestroy(event_);
  }
  void set(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "cudaEventRecord"); }
  /// Waits until everything before the mark is done. Returns at once where it was never set.
  void wait() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// The same where an error may not be thrown.
  void drain() const noexcept { cudaEventSynchronize(event_); }
  /// Whether everything before the mark is done.
  bool is_past() const {
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }
  /// Lets later work on `stream` wait for the mark. The host does not wait.
  void hold(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t event_{};
};

/// While it lives, this thread may allocate and wait while another one records a graph, in any mode.
class beside_recording {
 public:
  beside_recording() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  beside_recording(const beside_recording&) = delete;
  beside_recording& operator=(const beside_recording&) = delete;
  ~beside_recording() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// Blocks of page-locked memory, all of one size. They are made many at a time and used again when nobody holds them,
/// so no step makes any once there are enough. Any thread may release one.
class row_blocks {
  struct pool {
    std::mutex mutex;
    host_vector<pinned_buffer<std::byte>> made;
    host_vector<std::byte*> unused;
  };

 public:
  using block = std::shared_ptr<const std::byte>;

  explicit row_blocks(std::size_t bytes) : bytes_((bytes + 255) / 256 * 256), pool_(std::make_shared<pool>()) {}
  /// A copy has blocks of its own: released blocks of a cache are used again in the order of its stream, and a copy has
  /// another stream.
  row_blocks(const row_blocks& other) : row_blocks(other.bytes_) {}
  row_blocks(row_blocks&&) noexcept = default;
  row_blocks& operator=(row_blocks other) noexcept {
    std::swap(bytes_, other.bytes_), std::swap(pool_, other.pool_);
    return *this;
  }

  std::size_t block_bytes() const { return bytes_; }
  /// A block that nobody else holds. Errors: no memory.
  block allocate() const {
    std::byte* data = nullptr;
    {
      const std::lock_guard lock(pool_->mutex);
      if (pool_->unused.empty()) {
        pool_->unused.reserve((pool_->made.size() + 1) * together);
        pool_->made.emplace_back(bytes_ * together);
        for (std::size_t i = together; i-- > 0;) pool_->unused.push_back(pool_->made.back().data() + i * bytes_);
      }
      data = pool_->unused.back();
      pool_->unused.pop_back();
    }
    return {data, [all = pool_](const std::byte* released) {
              const std::lock_guard lock(all->mutex);
              all->unused.push_back(const_cast<std::byte*>(released));  // the reserved memory suffices
            }};
  }
  /// Bytes of all blocks that were ever made.
  std::size_t bytes() const {
    const std::lock_guard lock(pool_->mutex);
    return pool_->made.size() * together * bytes_;
  }

 private:
  static constexpr std::size_t together = 64;
  std::size_t bytes_;
  std::shared_ptr<pool> pool_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
