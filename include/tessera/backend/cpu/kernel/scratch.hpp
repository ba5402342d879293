// Memory that is not copied with its owner.
#pragma once

#include "../../../core/config.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// Memory that an operation reuses from call to call and nothing reads between calls. A copy begins empty.
template <class T>
struct scratch {
  T memory;

  // By the default constructor of T: where a member of an aggregate throws, GCC 12 destroys the others twice after {}.
  scratch() : memory() {}
  scratch(const scratch&) : memory() {}
  scratch& operator=(const scratch&) { return *this; }
  scratch(scratch&&) noexcept = default;
  scratch& operator=(scratch&&) noexcept = default;

  T& operator*() { return memory; }
  T* operator->() { return &memory; }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
