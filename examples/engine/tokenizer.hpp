// Text to tokens and back, over a SentencePiece model or byte pairs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config.hpp"
#include "text/vocabulary.hpp"

namespace engine {

/// A model's tokenizer. Immutable once loaded; any number of threads may call it.
class tokenizer {
 public:
  /// Loads a tokenizer.model. Errors: not readable, or no SentencePiece model.
  static tokenizer load(const std::filesystem::path& path);
  /// The tokenizer of a model: of a folder its tokenizer.model, or else its tokenizer.json; of a GGUF file its own. A
  /// tokenizer.json with fewer tokens than config.json's vocab_size, by up to 1,023, gets unused ones behind them.
  /// Errors: as `load`, `byte_pairs::from` and `parse_tokenizer_json`; a folder without either file.
  static tokenizer of_model(const std::filesystem::path& model);

  tokenizer(tokenizer&&) noexcept;
  tokenizer& operator=(tokenizer&&) noexcept;
  ~tokenizer();

  /// The tokens of `text`. Adds neither bos nor eos: a text may continue a conversation.
  std::vector<token_t> encode(std::string_view text) const;

  /// The text of `tokens`; control tokens such as bos and eos give nothing.
  /// Errors: an id outside [0, vocab_size()).
  std::string decode(std::span<const token_t> tokens) const;

  std::optional<token_t> bos() const;
  std::optional<token_t> eos() const;
  /// As vocabulary::control.
  std::optional<token_t> control(std::string_view name) const;
  token_t vocab_size() const;

  /// Every token whose text contains a line break, ascending: what ends a one-line answer.
  std::span<const token_t> newline_tokens() const { return newline_tokens_; }

  /// One flag a token: 1 where a segment of the text ends. That is a token whose text, without spaces behind it, ends in
  /// . , ; : ! ? or one of their CJK forms, or that ends in a line break; of several in a row that hold nothing else, the
  /// last one. Errors: as `decode`.
  std::vector<std::uint8_t> boundaries(std::span<const token_t> tokens) const;

  /// The same by token id, for tokens that come one by one: nobody knows yet whether another delimiter follows.
  std::span<const std::uint8_t> ends_segment() const { return ends_segment_; }

 private:
  explicit tokenizer(std::unique_ptr<vocabulary> pieces);

  std::unique_ptr<vocabulary> pieces_;
  std::vector<token_t> newline_tokens_;
  std::vector<std::uint8_t> ends_segment_;  // by token id: its text ends in a delimiter
  std::vector<bool> delimiter_;             // and holds nothing else
};

}  // namespace engine
