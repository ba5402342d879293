#include "byte_pairs.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <queue>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "normal_form.hpp"

namespace engine {
namespace {

using tessera::fail;
using tessera::require;

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

}  // namespace

byte_pairs::byte_pairs(byte_pair_tables tables)
    : cutter_(tables.rule), takes_whole_words_(tables.takes_whole_words), is_composed_(tables.is_composed) {
  require(tables.texts.size() <= std::size_t(1) << 24 && tables.kinds.size() == tables.texts.size(),
          "tokens of the vocabulary", tables.texts.size(), "at most 2^24", "use another file");
  for (std::size_t i = 0; i < tables.texts.size(); ++i) {
    std::string& text = tables.texts[i];
    const auto id = token_t(i);
    switch (tables.kinds[i]) {
      case piece_kind::bytes:
        text = bytes_of_letters(text, "token " + std::to_string(i) + " of the vocabulary");
        ids_.emplace(text, id);
        pieces_.push_back(std::move(text));
        break;
      case piece_kind::added:
        if (!text.empty()) added_.emplace(text, id);
        pieces_.push_back(std::move(text));
        break;
      case piece_kind::control:
        controls_.emplace(std::move(text), id);
        pieces_.emplace_back();
        break;
      case piece_kind::unused:
        pieces_.emplace_back();
    }
  }
  for (const auto& [text, id] : added_) added_by_first_[static_cast<unsigned char>(text[0])].push_back(&text);
  for (auto& texts : added_by_first_)
    std::sort(texts.begin(), texts.end(), [](auto* a, auto* b) { return a->size() > b->size(); });
  add_merges(tables.merges);
  const auto checked = [&](const char* what, std::optional<token_t> id) {
    require(!id || (*id >= 0 && *id < size()), what, id.value_or(0), "a token of the vocabulary",
            "use a complete file");
    return id;
  };
  bos_ = checked("the token that begins a text", tables.bos);
  eos_ = checked("the token that ends a text", tables.eos);
}

void byte_pairs::add_merges(const std::vector<std::pair<std::string, std::string>>& merges) {
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const auto& [first, second] = merges[rank];
    const std::string what = "merge " + std::to_string(rank);
    const std::string left = bytes_of_letters(first, what), right = bytes_of_letters(second, what);
    const auto a = ids_.find(left), b = ids_.find(right), both = ids_.find(left + right);
    require(a != ids_.end() && b != ids_.end() && both != ids_.end(), what, printable(first + " " + second),
            "pieces of the vocabulary", "use a complete file");
    merges_.emplace(pair_key(a->second, b->second), merge{std::int32_t(rank), both->second});
  }
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
    if (found != merges_.end()) queue.push({found->second.rank, left, a, b});
  };
  for (std::int64_t i = 0; i + 1 < count; ++i) consider(i);
  while (!queue.empty()) {
    const candidate best = queue.top();
    queue.pop();
    symbol& left = symbols[std::size_t(best.left)];
    if (left.id != best.left_id || left.next < 0) continue;  // merged meanwhile
    symbol& right = symbols[std::size_t(left.next)];
    if (right.id != best.right_id) continue;
    left.id = merges_.find(pair_key(best.left_id, best.right_id))->second.made;
    right.id = -1;
    left.next = right.next;
    if (left.next >= 0) symbols[std::size_t(left.next)].previous = best.left;
    consider(left.previous);
    consider(best.left);
  }
  for (std::int64_t i = 0; i >= 0 && i < count; i = symbols[std::size_t(i)].next)
    into.push_back(symbols[std::size_t(i)].id);
}

// The longest added text that `text` begins with; null where there is none.
const std::string* byte_pairs::added_at(std::string_view text) const {
  for (const std::string* added : added_by_first_[static_cast<unsigned char>(text[0])])
    if (text.starts_with(*added)) return added;
  return nullptr;
}

void byte_pairs::encode_words(std::string_view text, std::vector<token_t>& into) const {
  for (const std::string_view word : cutter_.words(text)) encode_word(word, into);
}

std::vector<token_t> byte_pairs::encode(std::string_view text) const {
  if (is_composed_) require_composed(text);
  std::vector<token_t> tokens;
  std::size_t done = 0;
  for (std::size_t i = 0; !added_.empty() && i < text.size();) {
    const std::string* const added = added_at(text.substr(i));
    if (!added) {
      ++i;
      continue;
    }
    encode_words(text.substr(done, i - done), tokens);
    tokens.push_back(added_.at(*added));
    done = i += added->size();
  }
  encode_words(text.substr(done), tokens);
  return tokens;
}

std::string byte_pairs::decode(std::span<const token_t> tokens) const {
  std::string text;
  for (const token_t id : tokens) text += pieces_[std::size_t(id)];
  return text;
}

std::optional<token_t> byte_pairs::control(std::string_view name) const {
  const auto found = controls_.find(std::string(name));
  return found == controls_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace engine
