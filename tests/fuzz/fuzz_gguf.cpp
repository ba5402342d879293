// Any bytes give a file or a tessera::error; whatever a file promises can then be read, and its tokenizer made.
#include <cstddef>
#include <cstdint>
#include <span>
#include <tessera/core/error.hpp>

#include "engine/files/gguf.hpp"
#include "engine/text/byte_pairs.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto file = engine::gguf_file::parse(std::as_bytes(std::span(data, size)));
    for (const auto& [name, tensor] : file.tensors()) (void)file.to_fp32(name);
    const auto pieces = engine::byte_pairs::from(file);
    (void)pieces->decode(pieces->encode("It's 2026 \xc3\xa9\n  x"));
  } catch (const tessera::error&) {
  }
  return 0;
}
