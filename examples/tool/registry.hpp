// The methods that this build of the tool knows. The list itself stands in CMakeLists.txt.
#pragma once

#include <string_view>
#include <vector>

#include "method_cache.hpp"

namespace tool {

const std::vector<method_info>& methods();

/// Errors: there is none of that name; the message lists all, and the one that was probably meant.
const method_info& find_method(std::string_view name);

}  // namespace tool
