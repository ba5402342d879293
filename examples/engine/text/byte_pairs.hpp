// Byte-level byte-pair encoding, as GPT-2, Llama 3, Qwen 2 and SmolLM have it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "engine/files/gguf.hpp"
#include "vocabulary.hpp"

namespace engine {

/// How a text is cut into words before pairs are merged within each.
enum class word_rule { gpt2, smollm, llama3, qwen2 };

/// Cuts texts into words. Pimpl over PCRE2, whose header stays in the .cpp.
class word_cutter {
 public:
  explicit word_cutter(word_rule rule);
  word_cutter(word_cutter&&) noexcept;
  ~word_cutter();
  /// The words of a text, in order; together they are the text. Errors: no UTF-8.
  std::vector<std::string_view> words(std::string_view text) const;

 private:
  struct pattern;
  void cut(std::string_view text, std::vector<std::string_view>& into) const;
  word_rule rule_;
  std::unique_ptr<pattern> pattern_;
};

/// A vocabulary of byte sequences, and the order in which pairs of them are merged.
class byte_pairs final : public vocabulary {
 public:
  /// The tokenizer of a GGUF file.
  /// Errors   another kind of tokenizer or word rule, no merges, texts that are no byte-level pieces, ids outside the
  ///          vocabulary: tessera::error that names what is accepted.
  static std::unique_ptr<byte_pairs> from(const gguf_file& file);

  std::vector<token_t> encode(std::string_view text) const override;
  std::string decode(std::span<const token_t> tokens) const override;
  token_t size() const override { return token_t(pieces_.size()); }
  std::optional<token_t> bos() const override { return bos_; }
  std::optional<token_t> eos() const override { return eos_; }

  /// The id of a control token by its text, such as "<|im_start|>". Errors: there is none.
  token_t control(std::string_view text) const;

 private:
  explicit byte_pairs(word_rule rule) : cutter_(rule), takes_whole_words_(rule == word_rule::llama3) {}
  void encode_word(std::string_view word, std::vector<token_t>& into) const;

  word_cutter cutter_;
  bool takes_whole_words_;                        // a word that is a token is not merged anew
  std::vector<std::string> pieces_;               // by id: its bytes; empty: a control token
  std::unordered_map<std::string, token_t> ids_;  // by bytes
  std::unordered_map<std::uint64_t, std::pair<std::int32_t, token_t>>
      merges_;  // of two ids: rank, and what they become
  std::unordered_map<std::string, token_t> controls_;
  std::optional<token_t> bos_, eos_;
};

}  // namespace engine
