#include "words.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <tessera/core/error.hpp>

namespace engine {
namespace {

using tessera::fail;
using tessera::require;

// White space as the tokenizers' own expressions mean it: Unicode's property White_Space.
#define SPACES R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})"
#define SPACE "[" SPACES "]"
#define NO_SPACE "[^" SPACES "]"

// The published expressions, with white space spelled out.
const char* pattern_of(word_rule rule) {
  switch (rule) {
    case word_rule::llama3:
      return "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^" SPACES
             "\\p{L}\\p{N}]+[\\r\\n]*|" SPACE "*[\\r\\n]+|" SPACE "+(?!" NO_SPACE ")|" SPACE "+";
    case word_rule::qwen2:
      return "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" SPACES
             "\\p{L}\\p{N}]+[\\r\\n]*|" SPACE "*[\\r\\n]+|" SPACE "+(?!" NO_SPACE ")|" SPACE "+";
    default:
      return "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" SPACES "\\p{L}\\p{N}]+|" SPACE "+(?!" NO_SPACE
             ")|" SPACE "+";
  }
}

struct code_free {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct match_free {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
using code_pointer = std::unique_ptr<pcre2_code, code_free>;
using match_pointer = std::unique_ptr<pcre2_match_data, match_free>;

code_pointer compiled(const char* text) {
  int problem = 0;
  PCRE2_SIZE place = 0;
  code_pointer code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text), PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                                  &problem, &place, nullptr));
  require(code != nullptr, "expression of a tokenizer", text, "one that PCRE2 compiles",
          "install PCRE2 with Unicode support");
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);  // where it is not there, matching is slower
  return code;
}

/// Calls found(begin, end) for each match, from left to right.
template <class Found>
void each_match(const pcre2_code* code, std::string_view text, bool is_checked, const Found& found) {
  const match_pointer data(pcre2_match_data_create_from_pattern(code, nullptr));
  require(data != nullptr, "memory for a match", "none", "some", "free memory");
  for (std::size_t at = 0; at < text.size();) {
    const int count = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  is_checked ? PCRE2_NO_UTF_CHECK : 0, data.get(), nullptr);
    if (count == PCRE2_ERROR_NOMATCH) return;
    if (count < 0) fail("text", "not UTF-8, or too long for its expression", "UTF-8 text", "pass UTF-8 text");
    is_checked = true;
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data.get());
    found(std::size_t(ends[0]), std::size_t(ends[1]));
    at = std::max(std::size_t(ends[1]), at + 1);
  }
}

}  // namespace

struct word_cutter::pattern {
  code_pointer words, digits;  // digits: a rule that cuts them off first
};

word_cutter::word_cutter(word_rule rule) : rule_(rule), pattern_(std::make_unique<pattern>()) {
  pattern_->words = compiled(pattern_of(rule));
  if (rule == word_rule::smollm) pattern_->digits = compiled("\\p{N}");
}
word_cutter::word_cutter(word_cutter&&) noexcept = default;
word_cutter::~word_cutter() = default;

void word_cutter::cut(std::string_view text, std::vector<std::string_view>& into) const {
  std::size_t done = 0;
  each_match(pattern_->words.get(), text, true, [&](std::size_t begin, std::size_t end) {
    if (begin > done) into.push_back(text.substr(done, begin - done));
    into.push_back(text.substr(begin, end - begin));
    done = end;
  });
  if (done < text.size()) into.push_back(text.substr(done));
}

std::vector<std::string_view> word_cutter::words(std::string_view text) const {
  // Everything matches some expression, so the first match looks at all of the text for bytes that are no UTF-8.
  std::size_t seen = 0;
  each_match(pattern_->words.get(), text, false, [&](std::size_t, std::size_t) { ++seen; });
  std::vector<std::string_view> all;
  all.reserve(seen);
  if (!pattern_->digits) {
    cut(text, all);
    return all;
  }
  std::size_t done = 0;
  each_match(pattern_->digits.get(), text, true, [&](std::size_t begin, std::size_t end) {
    cut(text.substr(done, begin - done), all);
    all.push_back(text.substr(begin, end - begin));
    done = end;
  });
  cut(text.substr(done), all);
  return all;
}

}  // namespace engine
