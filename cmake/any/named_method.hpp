// A method that tessera::any has, and how its caches are made.
#pragma once

#include <tessera/backend/cpu/named_cache.hpp>

namespace tessera_any {

using maker = std::unique_ptr<tessera::any_cache> (*)(const tessera::any_cache_request&,
                                                      std::shared_ptr<tessera::cpu::executor>);
struct compiled {
  const char* element;
  tessera::index_t dim;
  maker make;
};
struct named_method {
  const char* name;
  tessera::host_vector<compiled> made;
};

}  // namespace tessera_any
