// A conversation whose cache lies on the CPU.
#pragma once

#include <memory>
#include <tessera/runtime/any/any_cache.hpp>

#include "method_cache.hpp"

namespace tool {

/// The cache of one conversation over any method's cache on the CPU, which is empty.
std::unique_ptr<method_cache> cpu_conversation(std::unique_ptr<tessera::any_cache> cache);

}  // namespace tool
