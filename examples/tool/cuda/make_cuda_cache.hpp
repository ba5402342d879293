// The caches of the CUDA backend.
#pragma once

#include <memory>
#include <string_view>

#include "tool/methods/method_cache.hpp"

namespace tool {

/// A method's cache on the device.
/// Errors: an element type or head dim that is not compiled, no device, too little memory.
std::unique_ptr<method_cache> make_cuda_cache(std::string_view method, const cache_request& request);

}  // namespace tool
