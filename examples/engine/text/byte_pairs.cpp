#include "byte_pairs.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <map>
#include <queue>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"

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

/// GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest for the letters from U+0100 on.
std::array<char32_t, 256> letters_of_bytes() {
  std::array<char32_t, 256> letters{};
  char32_t next = 256;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    letters[byte] = is_printable ? byte : next++;
  }
  return letters;
}
std::string bytes_of_letters(const std::string& text, const std::string& what) {
  static const auto bytes = [] {
    std::map<char32_t, char> table;
    const auto letters = letters_of_bytes();
    for (std::size_t byte = 0; byte < 256; ++byte) table[letters[byte]] = char(byte);
    return table;
  }();
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    char32_t letter = first;
    std::size_t length = 1;
    if (first >= 0xc0 && first < 0xe0 && i + 1 < text.size()) {
      letter = char32_t(first & 31) << 6 | (static_cast<unsigned char>(text[i + 1]) & 63);
      length = 2;
    }
    const auto found = first >= 0x80 && length == 1 ? bytes.end() : bytes.find(letter);
    if (found == bytes.end())
      fail(what, printable(text), "letters that stand for bytes", "use a file with a byte-level tokenizer");
    result += found->second;
    i += length;
  }
  return result;
}

std::uint64_t pair_key(token_t left, token_t right) {
  return std::uint64_t(std::uint32_t(left)) << 32 | std::uint32_t(right);
}

std::optional<token_t> special(const gguf_file& file, const char* key, token_t size) {
  if (!file.value(key)) return std::nullopt;
  const std::int64_t id = file.count(key);
  require(id >= 0 && id < size, std::string("gguf: \"") + key + "\"", id, "a token of the vocabulary",
          "use a complete file");
  return token_t(id);
}

word_rule rule_of(const gguf_file& file) {
  const std::string& kind = file.text("tokenizer.ggml.model");
  require(kind == "gpt2", "tokenizer of the file", printable(kind), "gpt2, which is byte-level byte-pair encoding",
          "use a file with such a tokenizer, or a folder with tokenizer.model");
  const std::map<std::string, word_rule> rules{{"gpt-2", word_rule::gpt2},    {"default", word_rule::gpt2},
                                               {"smollm", word_rule::smollm}, {"llama-bpe", word_rule::llama3},
                                               {"llama3", word_rule::llama3}, {"qwen2", word_rule::qwen2}};
  const std::string& rule = file.text("tokenizer.ggml.pre");
  const auto found = rules.find(rule);
  require(found != rules.end(), "word rule of the file's tokenizer", printable(rule),
          "gpt-2, smollm, llama-bpe, llama3 or qwen2", "use a file with such a tokenizer");
  return found->second;
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

std::unique_ptr<byte_pairs> byte_pairs::from(const gguf_file& file) {
  std::unique_ptr<byte_pairs> made(new byte_pairs(rule_of(file)));
  const auto& texts = file.texts("tokenizer.ggml.tokens");
  const auto& merges = file.texts("tokenizer.ggml.merges");
  require(texts.size() <= std::size_t(1) << 24, "tokens of the vocabulary", texts.size(), "at most 2^24",
          "use another file");
  const gguf_value* kinds = file.value("tokenizer.ggml.token_type");
  const auto* kind_of = kinds ? std::get_if<std::vector<std::int64_t>>(kinds) : nullptr;
  require(!kind_of || kind_of->size() == texts.size(), "gguf: \"tokenizer.ggml.token_type\"",
          kind_of ? kind_of->size() : 0, "one for each token, which are " + std::to_string(texts.size()),
          "use a complete file");
  for (std::size_t id = 0; id < texts.size(); ++id) {
    const std::int64_t kind = kind_of ? (*kind_of)[id] : 1;
    if (kind != 1) {
      made->controls_.emplace(texts[id], token_t(id));
      made->pieces_.push_back(kind == 4 ? texts[id] : std::string());
      continue;
    }
    std::string bytes = bytes_of_letters(texts[id], "token " + std::to_string(id) + " of the vocabulary");
    made->ids_.emplace(bytes, token_t(id));
    made->pieces_.push_back(std::move(bytes));
  }
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::string what = "merge " + std::to_string(rank);
    const std::size_t space = merges[rank].find(' ');
    require(space != std::string::npos, what, printable(merges[rank]), "two pieces with a space between them",
            "use a complete file");
    const std::string left = bytes_of_letters(merges[rank].substr(0, space), what),
                      right = bytes_of_letters(merges[rank].substr(space + 1), what);
    const auto a = made->ids_.find(left), b = made->ids_.find(right), both = made->ids_.find(left + right);
    require(a != made->ids_.end() && b != made->ids_.end() && both != made->ids_.end(), what, printable(merges[rank]),
            "pieces of the vocabulary", "use a complete file");
    made->merges_.emplace(pair_key(a->second, b->second), std::pair(std::int32_t(rank), both->second));
  }
  const gguf_value* adds = file.value("tokenizer.ggml.add_bos_token");
  const bool adds_bos = adds && std::holds_alternative<bool>(*adds) && std::get<bool>(*adds);
  const auto bos = special(file, "tokenizer.ggml.bos_token_id", made->size());
  if (adds_bos) made->bos_ = bos;
  made->eos_ = special(file, "tokenizer.ggml.eos_token_id", made->size());
  return made;
}

// Merges the pair of lowest rank, and of these the first, as long as there is one: n log n of the word's bytes.
void byte_pairs::encode_word(std::string_view word, std::vector<token_t>& into) const {
  if (takes_whole_words_) {
    const auto whole = ids_.find(std::string(word));
    if (whole != ids_.end()) return into.push_back(whole->second);
  }
  struct symbol {
    token_t id;
    std::int64_t previous, next;  // -1: none
  };
  struct candidate {
    std::int32_t rank;
    std::int64_t left;
    token_t left_id, right_id;
    bool operator<(const candidate& other) const {  // the queue's top is the largest
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::vector<symbol> symbols;
  std::priority_queue<candidate> queue;
  for (const char byte : word) {
    const auto found = ids_.find(std::string(1, byte));
    if (found == ids_.end())
      continue;  // a vocabulary may lack control characters: as in the models' own tokenizers they vanish
    const auto i = std::int64_t(symbols.size());
    if (i > 0) symbols.back().next = i;
    symbols.push_back({found->second, i - 1, -1});
  }
  const auto count = std::int64_t(symbols.size());
  const auto consider = [&](std::int64_t left) {
    if (left < 0 || symbols[std::size_t(left)].next < 0) return;
    const token_t a = symbols[std::size_t(left)].id, b = symbols[std::size_t(symbols[std::size_t(left)].next)].id;
    const auto found = merges_.find(pair_key(a, b));
    if (found != merges_.end()) queue.push({found->second.first, left, a, b});
  };
  for (std::int64_t i = 0; i + 1 < count; ++i) consider(i);
  while (!queue.empty()) {
    const candidate best = queue.top();
    queue.pop();
    symbol& left = symbols[std::size_t(best.left)];
    if (left.id != best.left_id || left.next < 0) continue;  // merged meanwhile
    symbol& right = symbols[std::size_t(left.next)];
    if (right.id != best.right_id) continue;
    left.id = merges_.find(pair_key(best.left_id, best.right_id))->second.second;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[std::size_t(left.next)].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  for (std::int64_t i = 0; i >= 0 && i < count; i = symbols[std::size_t(i)].next)
    into.push_back(symbols[std::size_t(i)].id);
}

std::vector<token_t> byte_pairs::encode(std::string_view text) const {
  std::vector<token_t> tokens;
  for (const std::string_view word : cutter_.words(text)) encode_word(word, tokens);
  return tokens;
}

std::string byte_pairs::decode(std::span<const token_t> tokens) const {
  std::string text;
  for (const token_t id : tokens) text += pieces_[std::size_t(id)];
  return text;
}

token_t byte_pairs::control(std::string_view text) const {
  const auto found = controls_.find(std::string(text));
  require(found != controls_.end(), "control token", printable(text), "one of the vocabulary", "use a chat model");
  return found->second;
}

}  // namespace engine
