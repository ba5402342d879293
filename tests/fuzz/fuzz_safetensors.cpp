// Any bytes give a file or a tessera::error; whatever a file promises can then be read.
#include <cstddef>
#include <cstdint>
#include <span>
#include <tessera/core/error.hpp>

#include "engine/files/safetensors.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto file = engine::safetensors_file::parse(std::as_bytes(std::span(data, size)));
    for (const auto& [name, tensor] : file.tensors()) {
      try {
        engine::require_finite(name, file.to_fp32(name, tensor.shape));
      } catch (const tessera::error&) {
        // An integer tensor, or a value that is not finite.
      }
      try {
        (void)file.to_int64(name, tensor.shape);
      } catch (const tessera::error&) {
        // A floating-point tensor.
      }
    }
  } catch (const tessera::error&) {
  }
  return 0;
}
