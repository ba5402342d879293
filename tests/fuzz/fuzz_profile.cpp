// Any text gives a profile whose shares, or gates whose classes, a cache may take, or a tessera::error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <tessera/budget/calibrated.hpp>
#include <tessera/budget/head_classes.hpp>
#include <tessera/core/error.hpp>

#include "tool/heads/gates.hpp"
#include "tool/profile/profile_file.hpp"

namespace {

void take_profile(std::string_view text) {
  tessera::profile profile;
  try {
    profile = tool::parse_profile(text, "fuzzed");
  } catch (const tessera::error&) {
    return;
  }
  const tessera::calibrated budget{.shares = profile.shares()};
  budget.check();  // throws nothing that a profile has let through
  budget.check_model(profile.layers, profile.kv_heads);
  if (tool::parse_profile(tool::profile_text(profile), "written").budget != profile.budget) std::abort();
  profile.set_alpha(1);
}

void take_gates(std::string_view text) {
  tool::head_gates found;
  try {
    found = tool::parse_gates(text, "fuzzed");
  } catch (const tessera::error&) {
    return;
  }
  tessera::head_classes budget;
  budget.gates = {found.gates.data(), found.layers, found.kv_heads};
  budget.check();
  budget.check_model(found.layers, found.kv_heads);
  tessera::index_t streaming = 0;
  for (tessera::index_t head = 0; head < found.kv_heads && found.gates.size() < 1000; ++head)
    streaming += budget.streams(found.layers - 1, head);
  if (streaming > found.kv_heads) std::abort();
  if (tool::parse_gates(tool::gates_text(found), "written").gates != found.gates) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  take_profile(text);
  take_gates(text);
  return 0;
}
