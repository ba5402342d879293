// Segments of a text: runs of tokens between the boundaries that an engine's tokenizer finds.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "../config.hpp"
#include "../error.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The longest segment, in tokens. Text without punctuation is cut there.
inline constexpr index_t max_segment_tokens = 256;

/// The segment of a text's next token. All tokens of a conversation count, dropped ones too, so that chunks of any size
/// give the same numbers.
struct segment_cursor {
  index_t segment = 0;
  index_t tokens = 0;  ///< of that segment so far

  /// Advances by one token. Returns its segment. `ends`: the token is the last one of its segment.
  TESSERA_HD index_t advance(bool ends) {
    const index_t current = segment;
    if (++tokens == max_segment_tokens || ends) {
      ++segment;
      tokens = 0;
    }
    return current;
  }

  /// Advances by `count` tokens. `boundaries` [count] is 1 where a segment ends behind the token; null: nowhere.
  TESSERA_HD void advance(const std::uint8_t* boundaries, index_t count) {
    for (index_t t = 0; t < count; ++t) advance(boundaries && boundaries[t] != 0);
  }
};

/// The segments of new tokens: the cursor of the first of them, and the tokens behind which a segment ends.
struct segment_marks {
  segment_cursor start{};
  const std::uint8_t* boundaries = nullptr;  ///< a flag for each token, 0 or 1; null: segments end by their length only
};

/// Errors   other than one flag for each of `tokens` tokens; flags that are neither 0 nor 1: tessera::error.
inline void require_boundaries(std::span<const std::uint8_t> boundaries, index_t tokens) {
  require(offset_t(boundaries.size()) == tokens, "boundaries", boundaries.size(),
          "one flag for each new token, which are " + std::to_string(tokens),
          "pass 1 for a token after which a segment of the text ends, else 0");
  for (std::size_t t = 0; t < boundaries.size(); ++t) {
    if (boundaries[t] > 1)  // makes its strings only where one is wrong
      fail("boundaries[" + std::to_string(t) + "]", int(boundaries[t]), "0 or 1",
           "pass 1 for a token after which a segment of the text ends");
  }
}

TESSERA_NAMESPACE_END
