#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <tessera/core/error.hpp>

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

TEST_CASE("the shipped tokenizer refuses ids outside its vocabulary") {
  const auto tokenizer = shipped();
  if (!tokenizer) return;
  for (const engine::token_t token : {-1, tokenizer->vocab_size()})
    CHECK_THROWS_WITH(tokenizer->decode({&token, 1}), contains("token id"));
}
