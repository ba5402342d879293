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
                                         const std::string& rule) {
  gguf_bytes file;
  put_tokenizer(file, merges, rule);
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
  const engine::token_t end = pieces->control("<|end|>");
  CHECK(pieces->eos() == end);
  CHECK(!pieces->bos());
  CHECK(pieces->decode({&end, 1}).empty());
  CHECK_THROWS_AS(pieces->control("<|no|>"), tessera::error);
  CHECK_THROWS_WITH(made({}, "unknown"), contains("expected gpt-2, smollm"));
}
