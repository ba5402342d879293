// GGUF files as a test writes them: values and tensors of fp32, one behind the other.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace engine_tests {

class gguf_bytes {
 public:
  void text(const std::string& key, const std::string& value) {
    begin(key, 8);
    put_text(values_, value);
  }
  void count(const std::string& key, std::uint32_t value) {
    begin(key, 4);
    put(values_, value);
  }
  void number(const std::string& key, float value) {
    begin(key, 6);
    put(values_, value);
  }
  void flag(const std::string& key, bool value) {
    begin(key, 7);
    put(values_, std::uint8_t(value));
  }
  void texts(const std::string& key, const std::vector<std::string>& items) {
    begin(key, 9);
    put(values_, std::uint32_t(8));
    put(values_, std::uint64_t(items.size()));
    for (const std::string& item : items) put_text(values_, item);
  }
  void counts(const std::string& key, const std::vector<std::int32_t>& items) {
    begin(key, 9);
    put(values_, std::uint32_t(5));
    put(values_, std::uint64_t(items.size()));
    for (const std::int32_t item : items) put(values_, item);
  }
  /// `shape`: slowest axis first.
  void tensor(const std::string& name, const std::vector<std::int64_t>& shape, const std::vector<float>& values) {
    put_text(rows_, name);
    put(rows_, std::uint32_t(shape.size()));
    for (std::size_t axis = shape.size(); axis-- > 0;) put(rows_, std::uint64_t(shape[axis]));
    put(rows_, std::uint32_t(0));
    put(rows_, std::uint64_t(data_.size()));
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    data_.resize((data_.size() + 31) / 32 * 32);
    ++tensors_;
  }

  std::string bytes() const {
    std::string all = "GGUF";
    put(all, std::uint32_t(3));
    put(all, tensors_);
    put(all, count_);
    all += values_ + rows_;
    all.resize((all.size() + 31) / 32 * 32);
    return all + data_;
  }

 private:
  template <class T>
  static void put(std::string& to, T value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  static void put_text(std::string& to, const std::string& text) {
    put(to, std::uint64_t(text.size()));
    to += text;
  }
  void begin(const std::string& key, std::uint32_t kind) {
    put_text(values_, key);
    put(values_, kind);
    ++count_;
  }

  std::uint64_t tensors_ = 0, count_ = 0;
  std::string values_, rows_, data_;
};

/// GPT-2's letter for a byte, in UTF-8.
inline std::string letter_of(unsigned char byte) {
  const auto printable = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int letter = byte;
  if (!printable(byte)) {
    letter = 256;
    for (int b = 0; b < byte; ++b) letter += !printable(b);
  }
  if (letter < 128) return std::string(1, char(letter));
  return {char(0xc0 | letter >> 6), char(0x80 | (letter & 63))};
}
inline std::string letters_of(const std::string& bytes) {
  std::string letters;
  for (const char byte : bytes) letters += letter_of(static_cast<unsigned char>(byte));
  return letters;
}

/// A byte-level vocabulary: every byte, what each merge makes, control tokens behind them, the first of which ends a text, and
/// texts that are tokens by themselves.
inline void put_tokenizer(gguf_bytes& file, const std::vector<std::pair<std::string, std::string>>& merges,
                          const std::string& rule, const std::vector<std::string>& controls = {"<|end|>"},
                          const std::vector<std::string>& added = {}) {
  std::vector<std::string> tokens, joined;
  for (int byte = 0; byte < 256; ++byte) tokens.push_back(letter_of(static_cast<unsigned char>(byte)));
  for (const auto& [left, right] : merges) {
    tokens.push_back(letters_of(left + right));
    joined.push_back(letters_of(left) + " " + letters_of(right));
  }
  std::vector<std::int32_t> kinds(tokens.size(), 1);
  const std::size_t end = tokens.size();
  tokens.insert(tokens.end(), controls.begin(), controls.end());
  kinds.resize(tokens.size(), 3);
  tokens.insert(tokens.end(), added.begin(), added.end());
  kinds.resize(tokens.size(), 4);
  file.text("tokenizer.ggml.model", "gpt2");
  file.text("tokenizer.ggml.pre", rule);
  file.texts("tokenizer.ggml.tokens", tokens);
  file.counts("tokenizer.ggml.token_type", kinds);
  file.texts("tokenizer.ggml.merges", joined);
  file.count("tokenizer.ggml.eos_token_id", std::uint32_t(end));
}

}  // namespace engine_tests
