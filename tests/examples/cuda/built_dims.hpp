// Head dims that the tool was built for and that CUDA caches of the tool take.
#pragma once

#include <algorithm>
#include <iterator>
#include <tessera/core/types.hpp>

#include "tool/methods/method_cache.hpp"

namespace tool_tests {

constexpr bool has_dim(int dim) {
  return std::find(std::begin(tool::head_dims), std::end(tool::head_dims), dim) != std::end(tool::head_dims);
}
/// The same where the tool was built for one of them alone.
inline constexpr tessera::index_t small_dim = has_dim(64) ? 64 : 128, large_dim = has_dim(128) ? 128 : 64;

}  // namespace tool_tests
