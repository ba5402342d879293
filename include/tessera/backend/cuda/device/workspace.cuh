// The memory of an operation, cut into its arrays.
#pragma once

#include <cstddef>

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Cuts a workspace into consecutive arrays, each aligned to 256 bytes like cudaMalloc's memory. An operation derives a
/// struct whose members are its arrays, in order; one line gives an array's name and its size. Without memory, the
/// sizes are only added up, and `bytes` is how much memory the operation needs.
class workspace_cut {
 public:
  explicit workspace_cut(void* memory) : memory_(static_cast<unsigned char*>(memory)) {}

  template <class T>
  T* array(std::size_t count) {
    return static_cast<T*>(block(count * sizeof(T)));
  }
  /// Memory of another operation, as one block.
  void* block(std::size_t bytes) {
    const std::size_t begin = (bytes_ + 255) / 256 * 256;
    bytes_ = begin + bytes;
    return memory_ ? memory_ + begin : nullptr;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  unsigned char* memory_;
  std::size_t bytes_ = 0;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
