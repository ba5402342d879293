// The methods that this build of the tool knows. CMake makes the list from the headers in
// include/tessera/methods.
#pragma once

#include <string_view>
#include <vector>

#include "method_cache.hpp"

namespace tool {

const std::vector<method_info>& methods();

/// Errors: there is none of that name; the message lists all, and the one that was probably meant.
const method_info& find_method(std::string_view name);

bool has_parameter(const method_info& method, std::string_view name);

/// Whether a method has been given a profile: its budget then says nothing.
bool names_profile(const method_info& method, const std::vector<setting>& given);

/// `given`, and behind it max_new = `longest_answer` where the method has such a parameter and `given` does not set it:
/// who limits an answer knows how many tokens of it a plan has to leave room for.
/// longest_answer: most tokens that a turn may decode, at least 1.
std::vector<setting> with_answer_limit(const method_info& method, std::vector<setting> given, index_t longest_answer);

}  // namespace tool
