// Memory that many random shapes share, so that thousands of them need few allocations and copies.
#pragma once
#include <cstddef>
#include <vector>

#include "backend/cuda/device.hpp"

namespace gpu_test {

using namespace tessera;

/// Bytes on the device and their image on the host, handed out piece by piece.
class arena {
 public:
  arena() = default;
  arena(const arena&) = delete;
  ~arena() { cudaFree(device_); }

  void clear() { host_.clear(); }
  /// Room for `count` values; returns where it begins.
  template <class U>
  std::size_t take(std::size_t count) {
    const std::size_t at = (host_.size() + 255) / 256 * 256;
    host_.resize(at + std::max<std::size_t>(count, 1) * sizeof(U));
    return at;
  }
  template <class U>
  std::size_t put(const std::vector<U>& values) {
    const std::size_t at = take<U>(values.size());
    std::copy(values.begin(), values.end(), host<U>(at));
    return at;
  }
  void upload() {
    if (host_.size() > room_) {
      cudaFree(device_);
      device_ = nullptr;
      room_ = 2 * host_.size();
      cuda::check(cudaMalloc(&device_, room_), "cudaMalloc");
    }
    cuda::check(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void download() {
    cuda::check(cudaMemcpy(host_.data(), device_, host_.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  template <class U>
  U* host(std::size_t at) {
    return reinterpret_cast<U*>(host_.data() + at);
  }
  template <class U>
  U* device(std::size_t at) const {
    return reinterpret_cast<U*>(device_ + at);
  }

 private:
  std::vector<unsigned char> host_;
  unsigned char* device_ = nullptr;
  std::size_t room_ = 0;
};

/// The memory that all chunks share: inputs are uploaded, results come back, scratch stays.
struct memory {
  arena in, out;
  gpu_test::buffer<unsigned char> scratch{std::size_t(64) << 20};
};

}  // namespace gpu_test
