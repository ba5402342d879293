// Segments of a text: runs of tokens between the boundaries that an engine's tokenizer finds.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "../config.hpp"
#include "../error.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// No segment is longer: text without punctuation is cut after so many tokens.
inline constexpr index_t most_segment_tokens = 256;

/// Where a text stands: which segment its next token belongs to. Counted over all tokens of a conversation, whatever
/// has been dropped since, so that chunks of any size number alike.
struct segment_cursor {
  index_t segment = 0;
  index_t tokens = 0;  ///< that the segment has so far

  /// The next token's segment; `ends`: that token is its last.
  TESSERA_HD index_t take(bool ends) {
    const index_t own = segment;
    if (++tokens == most_segment_tokens || ends) {
      ++segment;
      tokens = 0;
    }
    return own;
  }

  /// Several tokens at once; `boundaries` [count], 1 after which a segment ends; null: none does.
  TESSERA_HD void take(const std::uint8_t* boundaries, index_t count) {
    for (index_t t = 0; t < count; ++t) take(boundaries && boundaries[t] != 0);
  }
};

/// What new tokens say about their segments: where the text stands before them, and after which of them one ends.
struct segment_marks {
  segment_cursor before{};
  const std::uint8_t* boundaries = nullptr;  ///< one a token, 0 or 1; null: no segment ends, but for its length
};

/// Errors   other than one flag for each of `tokens` tokens; flags that are neither 0 nor 1: tessera::error.
inline void require_boundaries(std::span<const std::uint8_t> boundaries, index_t tokens) {
  require(offset_t(boundaries.size()) == tokens, "boundaries", boundaries.size(),
          "one flag for each new token, which are " + std::to_string(tokens),
          "pass 1 for a token after which a segment of the text ends, else 0");
  for (std::size_t t = 0; t < boundaries.size(); ++t) {
    if (boundaries[t] > 1)  // words for the one that is wrong, not for each that is right
      fail("boundaries[" + std::to_string(t) + "]", int(boundaries[t]), "0 or 1",
           "pass 1 for a token after which a segment of the text ends");
  }
}

TESSERA_NAMESPACE_END
