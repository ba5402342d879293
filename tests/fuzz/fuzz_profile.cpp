// Any text gives a profile whose shares a cache may take, or a tessera::error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <tessera/budget/calibrated.hpp>
#include <tessera/core/error.hpp>

#include "tool/profile/profile_file.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::profile profile;
  try {
    profile = tool::parse_profile({reinterpret_cast<const char*>(data), size}, "fuzzed");
  } catch (const tessera::error&) {
    return 0;
  }
  const tessera::calibrated budget{.shares = profile.shares()};
  budget.check();  // throws nothing that a profile has let through
  budget.check_model(profile.layers, profile.kv_heads);
  if (tool::parse_profile(tool::profile_text(profile), "written").budget != profile.budget) std::abort();
  profile.set_alpha(1);
  return 0;
}
