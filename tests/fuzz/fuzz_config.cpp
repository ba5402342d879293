// Any text gives a config that keeps its promises, or a tessera::error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <tessera/core/error.hpp>

#include "engine/config.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto config = engine::parse_config({reinterpret_cast<const char*>(data), size});
    if (config.num_attention_heads % config.num_key_value_heads != 0 || config.head_dim < 64) std::abort();
  } catch (const tessera::error&) {
  }
  return 0;
}
