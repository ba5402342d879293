// Head dims, element types and methods that the tool was built for and that CUDA caches of the tool take.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>

#include "catch.hpp"
#include "tool/cuda/make_cuda_cache.hpp"
#include "tool/methods/registry.hpp"

namespace tool_tests {

constexpr bool has_dim(int dim) {
  return std::find(std::begin(tool::head_dims), std::end(tool::head_dims), dim) != std::end(tool::head_dims);
}
/// The same where the tool was built for one of them alone.
inline constexpr tessera::index_t small_dim = has_dim(64) ? 64 : 128, large_dim = has_dim(128) ? 128 : 64;

/// Whether the tool has this method; says that it is skipped where not.
inline bool has_method(std::string_view name) {
  const auto& all = tool::methods();
  if (std::any_of(all.begin(), all.end(), [&](const tool::method_info& method) { return method.name == name; }))
    return true;
  WARN("skipped: the tool is not built with " + std::string(name));
  return false;
}
/// Whether CUDA caches are built for elements of a type: others are refused before the method is looked at.
inline bool has_element(tool::element_type element) {
  tool::cache_request request;
  request.head_dim = int(small_dim);
  request.element = element;
  try {
    tool::make_cuda_cache("none", request);
  } catch (const tessera::error& refusal) {
    return std::string(refusal.what()).find("element type of the cache") == std::string::npos;
  }
  return true;
}

}  // namespace tool_tests
