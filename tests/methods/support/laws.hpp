// What every method must do, whatever its policies; method.cpp.in calls these for each published method.
#pragma once

#include <string>

namespace methods_test {

/// Random conversations against the reference. A method with a policy that the reference does not know is compared with
/// itself, in one shot and in chunks, and its outputs with attention in double over what it says that it attended.
void follow_reference(const std::string& method);

/// Full budget is dense attention; prompts see what is stored; a batch has the bits of single calls; a conversation may
/// begin with a step; candidates are stored slots.
void keep_laws(const std::string& method);

}  // namespace methods_test
