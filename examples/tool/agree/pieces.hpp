// Prompts with the tokens behind them: cut from a text, or anybody's, from a JSON Lines file.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "engine/tokenizer.hpp"

namespace tool {

/// What a conversation begins with: the tokenizer's bos, where it has one.
std::vector<engine::token_t> first_tokens(const engine::tokenizer& tokenizer);

/// A piece of a text: a prompt, and the tokens behind it.
struct text_piece {
  std::vector<engine::token_t> prompt, following;
  std::int64_t length = 0;  ///< its prompt counts among those of up to so many tokens
};

/// `count` pieces of a text, from its beginning to its end at even distances; they may overlap. `first`: tokens that each
/// begins with.
/// Errors   a text with fewer tokens than one piece.
std::vector<text_piece> pieces_of(std::span<const engine::token_t> text, std::span<const engine::token_t> first,
                                  std::size_t count, std::int64_t prompt, std::int64_t following);

/// What pieces are cut out of lines.
struct piece_sizes {
  std::vector<std::int64_t> prompts;
  std::int64_t steps;
  bool required;  ///< whether `prompts` must be of use
};

/// Reads JSON Lines. {"text": "..."} gives a piece for each length of a prompt, from the text's beginning.
/// {"prompt": "...", "continuation": "..."} gives one piece, with at most `steps` tokens behind the prompt; its length is
/// the next power of two. Other keys are ignored, and empty lines skipped.
/// Errors   a line that is no such object, a text that is too short; the message names `source` and the line.
std::vector<text_piece> parse_prompts(std::string_view text, std::string_view source,
                                      const engine::tokenizer& tokenizer, const piece_sizes& sizes);

}  // namespace tool
