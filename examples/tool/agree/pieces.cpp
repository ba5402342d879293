#include "pieces.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <tessera/core/error.hpp>

#include "tool/forms/json_lines.hpp"

namespace tool {

using engine::token_t;

std::vector<token_t> first_tokens(const engine::tokenizer& tokenizer) {
  return tokenizer.bos() ? std::vector<token_t>{*tokenizer.bos()} : std::vector<token_t>{};
}

namespace {

/// The prompt's tokens are those that the whole text begins with.
text_piece own_piece(const std::string& prompt, const std::string& continuation, const engine::tokenizer& tokenizer,
                     std::int64_t steps, const std::string& place) {
  const std::vector<token_t> whole = tokenizer.encode(prompt + continuation), alone = tokenizer.encode(prompt);
  const auto end = std::mismatch(whole.begin(), whole.end(), alone.begin(), alone.end()).first;
  text_piece piece{first_tokens(tokenizer), {end, std::min(whole.end(), end + std::min(steps, whole.end() - end))}};
  piece.prompt.insert(piece.prompt.end(), whole.begin(), end);
  tessera::require(piece.prompt.size() >= 2 && !piece.following.empty(), place,
                   std::to_string(piece.prompt.size()) + " tokens of a prompt and " +
                       std::to_string(piece.following.size()) + " behind it",
                   "at least 2 and 1", "write a longer \"prompt\" or \"continuation\"");
  piece.length = std::int64_t(std::bit_ceil(piece.prompt.size()));
  return piece;
}

}  // namespace

std::vector<text_piece> pieces_of(std::span<const token_t> text, std::span<const token_t> first, std::size_t count,
                                  std::int64_t prompt, std::int64_t following) {
  const auto own = prompt - std::int64_t(first.size()), needed = own + following, have = std::int64_t(text.size());
  tessera::require(own >= 1 && have >= needed, "tokens of the text", have,
                   "at least " + std::to_string(std::max<std::int64_t>(needed, 1 + following)) + ", which a piece has",
                   "pass a longer text, or a smaller --prompt or --steps");
  std::vector<text_piece> pieces;
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = count > 1 ? std::int64_t(i) * (have - needed) / std::int64_t(count - 1) : 0;
    text_piece piece{{first.begin(), first.end()}, {}, prompt};
    piece.prompt.insert(piece.prompt.end(), text.begin() + at, text.begin() + at + own);
    piece.following.assign(text.begin() + at + own, text.begin() + at + needed);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

std::vector<text_piece> parse_prompts(std::string_view text, std::string_view source,
                                      const engine::tokenizer& tokenizer, const piece_sizes& sizes) {
  constexpr const char* form = R"({"text": "..."} or {"prompt": "...", "continuation": "..."})";
  std::vector<text_piece> all;
  bool cut = false;
  for_each_object(text, source, form, [&](const nlohmann::json& object, const std::string& place) {
    const bool whole = object.contains("text"), own = object.contains("prompt") && object.contains("continuation");
    tessera::require(whole != own, place, whole ? "\"text\" beside \"prompt\"" : "neither form", form,
                     "give every line the keys of one form");
    if (own) {
      all.push_back(own_piece(required_text(object, "prompt", place), required_text(object, "continuation", place),
                              tokenizer, sizes.steps, place));
      return;
    }
    cut = true;
    const std::vector<token_t> tokens = tokenizer.encode(required_text(object, "text", place));
    const std::int64_t have = std::int64_t(tokens.size()) + std::int64_t(first_tokens(tokenizer).size());
    for (const std::int64_t prompt : sizes.prompts) {
      tessera::require(have >= prompt + sizes.steps, place + ": tokens of the text", have,
                       "at least " + std::to_string(prompt + sizes.steps) + ", which a piece has",
                       "pass a longer text, or a smaller --prompt or --steps");
      for (text_piece& piece : pieces_of(tokens, first_tokens(tokenizer), 1, prompt, sizes.steps))
        all.push_back(std::move(piece));
    }
  });
  tessera::require(cut || !sizes.required, "--prompt", "given",
                   "none: every line of " + std::string(source) + " has a prompt of its own", "leave it out");
  return all;
}

}  // namespace tool
