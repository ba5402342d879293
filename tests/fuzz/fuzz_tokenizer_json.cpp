// Any bytes give a tokenizer or a tessera::error, and any text that a tokenizer takes comes back from its tokens. The same bytes
// as a chat template are recognised, or refused.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <tessera/core/error.hpp>

#include "engine/text/chat_template.hpp"
#include "engine/text/tokenizer_json.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const engine::byte_pairs pieces(engine::parse_tokenizer_json(bytes));
    std::string ascii;
    for (int byte = 1; byte < 128; ++byte) ascii += char(byte);
    const bool is_whole = pieces.decode(pieces.encode(ascii)) == ascii;  // a vocabulary may lack bytes
    const std::string text = "It's 2026\n  x<|im_end|> <think>";
    if (is_whole && pieces.decode(pieces.encode(text)) != text) std::abort();
    (void)pieces.decode(pieces.encode(bytes));
  } catch (const tessera::error&) {
  }
  try {
    (void)engine::recognise_template(bytes);
  } catch (const tessera::error&) {
  }
  return 0;
}
