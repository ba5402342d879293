#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/tokenizer.hpp"
#include "temporary_folder.hpp"

namespace {

// The shipped model's tokenizer. Absent in a checkout without weights: then there is nothing to check.
std::optional<engine::tokenizer> shipped() {
  const std::filesystem::path path = std::filesystem::path(TESSERA_SOURCE_DIR) / "examples/model/tokenizer.model";
  if (!std::filesystem::exists(path)) {
    WARN("skipped: there is no " << path.string());
    return std::nullopt;
  }
  return engine::tokenizer::load(path);
}

}  // namespace

TEST_CASE("what is no SentencePiece model is refused with its path") {
  const engine_tests::temporary_folder folder;
  folder.write("tokenizer.model", "not a model");
  CHECK_THROWS_WITH(engine::tokenizer::load(folder / "tokenizer.model"), contains("tokenizer.model"));
  CHECK_THROWS_AS(engine::tokenizer::load(folder / "absent.model"), tessera::error);
}

TEST_CASE("the shipped tokenizer gives back the text it was given") {
  const auto tokenizer = shipped();
  if (!tokenizer) return;
  for (const std::string text : {"", "The secret code of amber falcon is 48213.", "int main() {\n  return 0;\n}\n",
                                 "  two leading spaces", "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x8c\x8d"}) {
    const auto tokens = tokenizer->encode(text);
    CHECK(tokenizer->decode(tokens) == text);
    for (const auto token : tokens) CHECK((token >= 0 && token < tokenizer->vocab_size()));
  }
}

TEST_CASE("the shipped tokenizer knows which tokens end a line") {
  const auto tokenizer = shipped();
  if (!tokenizer) return;
  const auto ends = tokenizer->newline_tokens();
  REQUIRE_FALSE(ends.empty());
  CHECK(std::is_sorted(ends.begin(), ends.end()));
  for (const auto token : ends) CHECK(tokenizer->decode({&token, 1}).find('\n') != std::string::npos);
  for (const auto token : tokenizer->encode("one line\n")) {
    const bool listed = std::binary_search(ends.begin(), ends.end(), token);
    CHECK(listed == (tokenizer->decode({&token, 1}).find('\n') != std::string::npos));
  }
}

TEST_CASE("segments end behind punctuation and line breaks, several in a row behind the last") {
  const auto tokenizer = shipped();
  if (!tokenizer) return;
  const auto ends = [&](const std::string& text) {
    const auto tokens = tokenizer->encode(text);
    const auto flags = tokenizer->boundaries(tokens);
    REQUIRE(flags.size() == tokens.size());
    std::vector<std::string> found;
    for (std::size_t t = 0; t < flags.size(); ++t) {
      if (flags[t]) found.push_back(tokenizer->decode(std::span(tokens).first(t + 1)));
    }
    return found;
  };
  CHECK(ends("One, two: three!\nFour five") == std::vector<std::string>{"One,", "One, two:", "One, two: three!\n"});
  CHECK(ends("Really?!... yes; no") == std::vector<std::string>{"Really?!...", "Really?!... yes;"});
  CHECK(ends("no punctuation at all").empty());
  CHECK(ends("").empty());
  const engine::token_t outside = tokenizer->vocab_size();
  CHECK_THROWS_WITH(tokenizer->boundaries({&outside, 1}), contains("token id"));
}

TEST_CASE("the shipped tokenizer refuses ids outside its vocabulary") {
  const auto tokenizer = shipped();
  if (!tokenizer) return;
  for (const engine::token_t token : {-1, tokenizer->vocab_size()})
    CHECK_THROWS_WITH(tokenizer->decode({&token, 1}), contains("token id"));
}
