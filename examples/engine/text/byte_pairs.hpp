// Byte-level byte-pair encoding, as GPT-2, Llama 3, Qwen 2 and SmolLM have it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/files/gguf.hpp"
#include "vocabulary.hpp"
#include "words.hpp"

namespace engine {

/// What a token of a byte-level vocabulary is.
enum class piece_kind : std::uint8_t {
  bytes,    ///< spelt in letters that stand for bytes; merges make it
  control,  ///< no text becomes it, and it gives no text
  added,    ///< a text by itself, found before words are cut
  unused
};

/// All that a byte-level tokenizer is made of, whichever file tells of it.
struct byte_pair_tables {
  word_rule rule = word_rule::gpt2;
  bool takes_whole_words = false;                           ///< a word that is a token is not merged anew
  bool is_composed = false;                                 ///< texts are brought to Unicode's normal form C first
  std::vector<std::string> texts;                           ///< by id
  std::vector<piece_kind> kinds;                            ///< by id
  std::vector<std::pair<std::string, std::string>> merges;  ///< in letters that stand for bytes, the first one first
  std::optional<token_t> bos, eos;
};

/// A vocabulary of byte sequences, and the order in which pairs of them are merged.
class byte_pairs final : public vocabulary {
 public:
  /// Errors   more than 2^24 tokens, texts that are no byte-level pieces, merges of pieces that are not there, bos or eos
  ///          outside the vocabulary: tessera::error.
  explicit byte_pairs(byte_pair_tables tables);

  /// The tokenizer of a GGUF file.
  /// Errors   as above; another kind of tokenizer or word rule, which names what is accepted; no merges.
  static std::unique_ptr<byte_pairs> from(const gguf_file& file);

  /// Errors also: text that is not in normal form C, of a tokenizer that would bring it there.
  std::vector<token_t> encode(std::string_view text) const override;
  std::string decode(std::span<const token_t> tokens) const override;
  token_t size() const override { return token_t(pieces_.size()); }
  std::optional<token_t> bos() const override { return bos_; }
  std::optional<token_t> eos() const override { return eos_; }
  std::optional<token_t> control(std::string_view name) const override;

 private:
  struct merge {
    std::int32_t rank;
    token_t made;
  };

  void add_merges(const std::vector<std::pair<std::string, std::string>>& merges);
  const std::string* added_at(std::string_view text) const;
  void encode_words(std::string_view text, std::vector<token_t>& into) const;
  void encode_word(std::string_view word, std::vector<token_t>& into) const;

  word_cutter cutter_;
  bool takes_whole_words_, is_composed_;
  std::vector<std::string> pieces_;                            // by id: its bytes; empty: a control token
  std::unordered_map<std::string, token_t> ids_;               // by bytes
  std::unordered_map<std::uint64_t, merge> merges_;            // by two ids
  std::unordered_map<std::string, token_t> controls_, added_;  // by text
  std::vector<const std::string*> added_by_first_[256];        // by first byte, the longest first
  std::optional<token_t> bos_, eos_;
};

}  // namespace engine
