// How a text is cut into words before pairs of bytes are merged within each.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

namespace engine {

/// Whose expression cuts the words.
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

}  // namespace engine
