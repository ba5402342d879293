#include "registry.hpp"

#include <algorithm>

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

bool has_parameter(const method_info& method, std::string_view name) {
  return std::ranges::any_of(method.parameters, [&](const parameter_info& known) { return known.name == name; });
}

bool names_profile(const method_info& method, const std::vector<setting>& given) {
  return method.takes_profile &&
         std::ranges::any_of(given, [](const setting& one) { return one.name == "profile" && one.value != "none"; });
}

std::vector<setting> with_answer_limit(const method_info& method, std::vector<setting> given, index_t longest_answer) {
  const bool chosen = std::ranges::any_of(given, [](const setting& one) { return one.name == "max_new"; });
  if (!chosen && has_parameter(method, "max_new")) given.push_back({"max_new", value_text(longest_answer)});
  return given;
}

}  // namespace tool
