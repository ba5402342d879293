// Memory that a copy does not take along.
#pragma once

#include "../../../core/config.hpp"

TESSERA_NAMESPACE_BEGIN
namespace cpu {

/// What an operation reuses from call to call and nobody reads between calls: a copy begins with its own, empty.
template <class T>
struct scratch {
  T memory{};

  scratch() = default;
  scratch(const scratch&) {}
  scratch& operator=(const scratch&) { return *this; }
  scratch(scratch&&) noexcept = default;
  scratch& operator=(scratch&&) noexcept = default;

  T& operator*() { return memory; }
};

}  // namespace cpu
TESSERA_NAMESPACE_END
