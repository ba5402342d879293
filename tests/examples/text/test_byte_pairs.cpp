// Byte-level byte-pair encoding: words as the published expressions cut them, merges against a plain oracle.
#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/text/byte_pairs.hpp"
#include "engine/text/normal_form.hpp"
#include "gguf_bytes.hpp"

using namespace engine_tests;
using engine::word_cutter;
using engine::word_rule;

namespace {

std::vector<std::string> cut(word_rule rule, const std::string& text) {
  std::vector<std::string> all;
  for (const std::string_view word : word_cutter(rule).words(text)) all.emplace_back(word);
  return all;
}
using words = std::vector<std::string>;

std::unique_ptr<engine::byte_pairs> made(const std::vector<std::pair<std::string, std::string>>& merges,
                                         const std::string& rule, const std::vector<std::string>& added = {}) {
  gguf_bytes file;
  put_tokenizer(file, merges, rule, {"<|end|>"}, added);
  const std::string bytes = file.bytes();
  return engine::byte_pairs::from(engine::gguf_file::parse(std::as_bytes(std::span(bytes.data(), bytes.size()))));
}

}  // namespace

TEST_CASE("texts are cut into words as each model's expression cuts them") {
  CHECK(cut(word_rule::gpt2, "it's  2026, ok") == words{"it", "'s", " ", " 2026", ",", " ok"});
  CHECK(cut(word_rule::smollm, "it's  2026, ok") == words{"it", "'s", "  ", "2", "0", "2", "6", ",", " ok"});
  CHECK(cut(word_rule::llama3, "it'S  20261, ok\n\n x") ==
        words{"it", "'S", " ", " ", "202", "61", ",", " ok", "\n\n", " x"});
  CHECK(cut(word_rule::qwen2, "a 12") == words{"a", " ", "1", "2"});
  CHECK(cut(word_rule::gpt2, "caf\u00e9 \u00bd\u0664 x\u00a0\u00a0y  ") ==
        words{"caf\u00e9", " \u00bd\u0664", " x", "\u00a0", "\u00a0", "y", "  "});
  CHECK(cut(word_rule::gpt2, "") == words{});
  for (const word_rule rule : {word_rule::gpt2, word_rule::smollm, word_rule::llama3, word_rule::qwen2}) {
    CHECK_THROWS_WITH(cut(rule, "ab\xff"), contains("UTF-8"));
    CHECK_THROWS_AS(cut(rule, std::string("\xc3", 1)), tessera::error);
  }
}

TEST_CASE("pairs are merged by rank, the first of equals first") {
  const std::vector<std::pair<std::string, std::string>> merges{{"a", "a"}, {"b", "a"},    {"aa", "b"}, {"aa", "aa"},
                                                                {"c", "a"}, {"aab", "aa"}, {"ba", "c"}};
  const auto pieces = made(merges, "gpt-2");
  const auto oracle = [&](const std::string& word) {
    std::vector<std::string> symbols;
    for (const char byte : word) symbols.emplace_back(1, byte);
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (const auto& [left, right] : merges) {
        const auto is_pair = [&](const std::string& a, const std::string& b) { return a == left && b == right; };
        auto at = std::adjacent_find(symbols.begin(), symbols.end(), is_pair);
        if (at == symbols.end()) continue;
        *at += *(at + 1);
        symbols.erase(at + 1);
        goes_on = true;
        break;
      }
    }
    return symbols;
  };
  std::mt19937 random(9);
  for (int i = 0; i < 2000; ++i) {
    std::string word;
    for (unsigned n = 1 + random() % 24; n > 0; --n) word += "abc"[random() % 3];
    const auto tokens = pieces->encode(word);
    std::vector<std::string> got;
    for (const auto token : tokens) got.push_back(pieces->decode({&token, 1}));
    CHECK(got == oracle(word));
  }
  CHECK(pieces->decode(pieces->encode("any \u20ac text\n\x01")) == "any \u20ac text\n\x01");
  CHECK(pieces->encode(std::string(200'000, 'a')).size() == 50'000);  // a long word takes no square of its length
  const engine::token_t end = pieces->control("<|end|>").value();
  CHECK(pieces->eos() == end);
  CHECK(!pieces->bos());
  CHECK(pieces->decode({&end, 1}).empty());
  CHECK(!pieces->control("<|no|>"));
  CHECK(!pieces->control("aab"));  // a text is no control token
  CHECK_THROWS_WITH(made({}, "unknown"), contains("expected gpt-2, smollm"));
}

TEST_CASE("a control token's name in a text is text, and an added text is one token") {
  const auto pieces = made({{"a", "b"}}, "gpt-2", {"<t>", "<t>x", "\u00e9\u00e9"});
  const auto texts = [&](const std::string& text) {
    words all;
    for (const auto token : pieces->encode(text)) all.push_back(pieces->decode({&token, 1}));
    return all;
  };
  CHECK(texts("<|end|>").size() == 7);
  CHECK(pieces->decode(pieces->encode("<|end|>")) == "<|end|>");
  CHECK(texts("ab<t>xab<t>") == words{"ab", "<t>x", "ab", "<t>"});
  CHECK(texts("\u00e9\u00e9\u00e9") == words{"\u00e9\u00e9", "\xc3", "\xa9"});
  CHECK_THROWS_AS(pieces->encode("ab<t>\xff"), tessera::error);
}

TEST_CASE("text that a tokenizer would compose first is refused, and composed text is not") {
  const auto refused = [](const std::string& text, const std::string& sentence) {
    CHECK_THROWS_WITH(engine::require_composed(text), contains(sentence) && contains("normal form C"));
  };
  refused("caf\u0065\u0301", "U+0301 at byte 4");
  refused("\u212b", "U+212B");                        // the sign of the angstrom is a letter's
  refused("\u1100\u1161", "U+1161");                  // Hangul by its parts
  refused("q\u0307\u0323", "U+0307");                 // a dot above, which may compose
  refused("\u05d1\u05bc\u05b7", "U+05B7 at byte 4");  // marks of Hebrew in another order
  for (const std::string text :
       {"caf\u00e9", "\ud55c\uae00", "\u05d1\u05b7\u05bc", "\u0e01\u0e35\u0e48", "\u4e2d \U0001f600 \xff"})
    CHECK_NOTHROW(engine::require_composed(text));
  CHECK_THROWS_WITH(made({}, "qwen2")->encode("e\u0301"), contains("U+0301"));
  CHECK_NOTHROW(made({}, "smollm")->encode("e\u0301"));
}
