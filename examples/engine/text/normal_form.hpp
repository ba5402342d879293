// Unicode's normal form C, to which some tokenizers bring a text before they cut it into words.
#pragma once

#include <string_view>

namespace engine {

/// Errors   text that is not surely in normal form C: a character that the form replaces, one that may become another
///          together with what stands before it, or combining marks in another order. Bytes that are no UTF-8 pass.
void require_composed(std::string_view text);

}  // namespace engine
