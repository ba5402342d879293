// The memory of an operation, cut into its arrays.
#pragma once

#include <cstddef>

#include "../../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Cuts a workspace into arrays, one behind the other, each on 256 bytes as cudaMalloc's are. An operation derives a
/// struct whose members are its arrays, in their order: each has its name and its size in one line. Without memory they
/// are counted, and `bytes` is what the operation asks for.
class workspace_cut {
 public:
  explicit workspace_cut(void* memory) : memory_(static_cast<unsigned char*>(memory)) {}

  template <class T>
  T* array(std::size_t count) {
    return static_cast<T*>(block(count * sizeof(T)));
  }
  /// Memory of another operation.
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
