// Device memory of one cache from PyTorch's allocator, so that torch.cuda's figures show it. Only with CUDA.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <tessera/core/error.hpp>
#include <utility>
#include <vector>

#include "recipe_library.hpp"

namespace tessera_torch {

/// Takes memory for the stream that is current and gives it back in the order of every stream that used it, also while a
/// graph is captured. One thread at a time. It must outlive the cache.
/// Errors   memory is taken while a graph is captured: it would belong to the graph.
class torch_memory {
 public:
  torch_memory() = default;
  torch_memory(const torch_memory&) = delete;
  torch_memory& operator=(const torch_memory&) = delete;

  device_memory source() { return {&take, &give_back, this}; }

  /// Work on this stream uses the memory from now on: what is given back is not reused before that work has ended.
  void used_by(c10::cuda::CUDAStream stream) {
    if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return;
    streams_.push_back(stream);
    for (const auto& [address, block] : blocks_) c10::cuda::CUDACachingAllocator::recordStream(block, stream);
  }

  /// Whether memory was asked for and there was none, since the last time that this was asked.
  bool ran_out() { return std::exchange(ran_out_, false); }

 private:
  static void* take(void* self, std::size_t bytes) { return static_cast<torch_memory*>(self)->take(bytes); }
  static void give_back(void* self, void* data, std::size_t) { static_cast<torch_memory*>(self)->blocks_.erase(data); }

  void* take(std::size_t bytes) {
    const bool captured = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    tessera::require(!captured, "a CUDA graph", "being captured", "none while a cache takes memory",
                     "make the cache and give it its prompt before the capture");
    try {
      c10::DataPtr block = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
      // The block may be one that this stream's work still reads; the library writes its zeros on another stream.
      c10::cuda::getCurrentCUDAStream().synchronize();
      for (const auto& stream : streams_) c10::cuda::CUDACachingAllocator::recordStream(block, stream);
      void* data = block.get();
      blocks_.emplace(data, std::move(block));
      return data;
    } catch (const c10::OutOfMemoryError&) {
      ran_out_ = true;
      return nullptr;
    }
  }

  std::map<void*, c10::DataPtr> blocks_;
  std::vector<c10::cuda::CUDAStream> streams_;
  bool ran_out_ = false;
};

}  // namespace tessera_torch
