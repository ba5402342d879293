#include "registry.hpp"

#include "values.hpp"

namespace tool {

const method_info& find_method(std::string_view name) {
  std::vector<std::string> names;
  for (const method_info& method : methods()) {
    if (method.name == name) return method;
    names.push_back(method.name);
  }
  require_one_of("method", name, names);
  throw tessera::error("unreachable: an unknown method passed its check");
}

}  // namespace tool
