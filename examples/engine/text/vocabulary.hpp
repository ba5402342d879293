// What a tokenizer is made of: pieces of text with ids, and a rule that cuts a text into them.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config.hpp"

namespace engine {

/// Immutable once made; any number of threads may call it.
class vocabulary {
 public:
  virtual ~vocabulary() = default;
  /// No text becomes a control token, whatever it holds.
  /// Errors   text that is no UTF-8: tessera::error.
  virtual std::vector<token_t> encode(std::string_view text) const = 0;
  /// The bytes of tokens, every id of which is one; control tokens give nothing.
  virtual std::string decode(std::span<const token_t> tokens) const = 0;
  virtual token_t size() const = 0;
  /// The token that every text begins with, and the one that ends it.
  virtual std::optional<token_t> bos() const = 0;
  virtual std::optional<token_t> eos() const = 0;
  /// The control token of that name, such as "<|im_start|>"; none where the vocabulary has no such control token.
  virtual std::optional<token_t> control(std::string_view name) const = 0;
};

}  // namespace engine
