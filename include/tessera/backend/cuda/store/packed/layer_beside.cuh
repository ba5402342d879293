// A layer whose segments are made on a stream of the cache's own, while the caller's stream runs the next layers.
#pragma once

#include <utility>

#include "../../../../core/host/host_vector.hpp"
#include "../../../../core/sequence_layer.hpp"
#include "../searched/pinned.cuh"
#include "packed_places.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// It has the lowest priority: its kernels give way to those of streams with a higher one.
class stream_beside {
 public:
  stream_beside() = default;
  /// Another stream. Whoever copies what the work writes to has waited for it.
  stream_beside(const stream_beside&) : stream_beside() {}
  stream_beside(stream_beside&& other) noexcept
      : stream_(std::exchange(other.stream_, nullptr)),
        before_(std::move(other.before_)),
        done_(std::move(other.done_)) {}
  stream_beside& operator=(stream_beside other) noexcept {
    std::swap(stream_, other.stream_);
    std::swap(before_, other.before_);
    std::swap(done_, other.done_);
    return *this;
  }
  ~stream_beside() {
    drain();
    if (stream_) cudaStreamDestroy(stream_);
  }

  /// What comes on the stream that this returns stands behind all that is on `stream` now.
  cudaStream_t begin(cudaStream_t stream) {
    if (!stream_) {
      int lowest = 0, highest = 0;
      check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
      check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, lowest), "cudaStreamCreate");
    }
    before_.set(stream);
    before_.hold(stream_);
    return stream_;
  }
  /// All that has come since `begin`: `stream`, or the host, waits for it.
  void end() { done_.set(stream_); }
  void hold(cudaStream_t stream) const { done_.hold(stream); }
  void wait() const { done_.wait(); }
  /// Until nothing is on it.
  void drain() const noexcept {
    if (stream_) cudaStreamSynchronize(stream_);
  }

 private:
  cudaStream_t stream_ = nullptr;
  stream_mark before_, done_;
};

/// The segments of one layer of one sequence, which nobody sees yet, and how many whole rows they hold.
struct layer_beside {
  sequence_layer owner{no_index, no_index};
  index_t due = 0;
  host_vector<segment_record> fresh;
  bool is_under_way() const { return owner.id != no_index; }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
