// tokenizer.json: the ids of Hugging Face's tokenizers, and what is refused.
#include <nlohmann/json.hpp>
#include <string>
#include <tessera/core/error.hpp>
#include <vector>

#include "catch.hpp"
#include "engine/files/input_file.hpp"
#include "engine/text/tokenizer_json.hpp"
#include "engine/tokenizer.hpp"
#include "examples/temporary_folder.hpp"

using nlohmann::json;

namespace {

const std::string fixtures = std::string(TESSERA_SOURCE_DIR) + "/tests/fixtures/tokenizers/";

json fixture(const std::string& name) { return json::parse(engine::read_text_file(fixtures + name + ".json")); }

void refused(const json& file, const std::string& sentence) {
  CHECK_THROWS_WITH(engine::byte_pairs(engine::parse_tokenizer_json(file.dump())), contains(sentence));
}
/// The fixture with another value at a JSON pointer.
void refused(const std::string& path, const json& value, const std::string& sentence,
             const std::string& name = "llama3") {
  INFO(path << " " << value);
  json file = fixture(name);
  file[json::json_pointer(path)] = value;
  refused(file, sentence);
}

}  // namespace

TEST_CASE("tokenizer.json files give the ids of Hugging Face's tokenizers, and the text back") {
  const json expected = fixture("expected");
  for (const std::string name : {"gpt2", "smollm", "llama3", "qwen2"}) {
    const engine::byte_pairs pieces(engine::read_tokenizer_json(fixtures + name + ".json"));
    CHECK(pieces.size() == 345);
    for (std::size_t i = 0; i < expected["texts"].size(); ++i) {
      const std::string text = expected["texts"][i].get<std::string>();
      CAPTURE(name, text);
      const auto tokens = pieces.encode(text);
      CHECK(tokens == expected["ids"][name][i].get<std::vector<engine::token_t>>());
      CHECK(pieces.decode(tokens) == text);
    }
    CHECK(pieces.control("<|im_end|>") == 342);
    CHECK(pieces.encode("<|im_end|>").size() > 1);
    CHECK(pieces.bos() == (name == "llama3" ? std::optional<engine::token_t>(340) : std::nullopt));
  }
  CHECK_THROWS_WITH(engine::byte_pairs(engine::read_tokenizer_json(fixtures + "qwen2.json")).encode("e\u0301"),
                    contains("normal form C"));
}

TEST_CASE("merges are read in both spellings") {
  json file = fixture("gpt2");
  const auto before = engine::byte_pairs(engine::parse_tokenizer_json(file.dump())).encode("the namespace");
  for (json& merge : file["model"]["merges"])
    merge = merge.is_array() ? json(merge[0].get<std::string>() + " " + merge[1].get<std::string>()) : merge;
  CHECK(engine::byte_pairs(engine::parse_tokenizer_json(file.dump())).encode("the namespace") == before);
}

TEST_CASE("other tokenizers are refused, and the sentence names what is accepted") {
  refused(json::parse("[1]"), "expected a JSON object");
  CHECK_THROWS_AS(engine::parse_tokenizer_json("{\"model\":"), tessera::error);
  CHECK_THROWS_AS(engine::parse_tokenizer_json(std::string(100'000, '[')), tessera::error);
  refused("/model/type", "Unigram", "BPE over letters that stand for bytes");
  refused("/model/byte_fallback", true, "\"byte_fallback\" is true");
  refused("/model/dropout", 0.1, "\"dropout\" is 0.1");
  refused("/model/end_of_word_suffix", "</w>", "\"end_of_word_suffix\"");
  json poor = fixture("gpt2");
  poor["model"]["unk_token"] = "<|endoftext|>";
  CHECK_NOTHROW(engine::parse_tokenizer_json(poor.dump()));
  poor["model"]["vocab"].erase("a");
  refused(poor, "null where a byte has no token of its own");
  refused("/normalizer", json{{"type", "NFKC"}}, "expected null or NFC");
  refused("/decoder", json{{"type", "Metaspace"}}, "\"decoder\"");
  for (const auto& [path, value] : {std::pair<std::string, json>{"/pre_tokenizer", json{{"type", "Metaspace"}}},
                                    {"/pre_tokenizer", nullptr},
                                    {"/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\p{N}{1,2}"},
                                    {"/pre_tokenizer/pretokenizers/0/behavior", "Removed"},
                                    {"/pre_tokenizer/pretokenizers/0/invert", true},
                                    {"/pre_tokenizer/pretokenizers/1/use_regex", true},
                                    {"/pre_tokenizer/pretokenizers/1/add_prefix_space", true},
                                    {"/pre_tokenizer/pretokenizers/1", nullptr}})
    refused(path, value, "ByteLevel as GPT-2 has it, Digits and ByteLevel as SmolLM has them, or Split and ByteLevel");
  refused("/pre_tokenizer/pretokenizers/0/individual_digits", false, "\"pre_tokenizer\"", "smollm");
  refused("/pre_tokenizer/add_prefix_space", true, "\"pre_tokenizer\"", "gpt2");
  const json eos{{"SpecialToken", {{"id", "<|im_end|>"}}}}, sequence{{"Sequence", {{"id", "A"}}}};
  refused("/post_processor/processors/1/single", json{sequence, eos}, "\"post_processor\"");
  refused("/post_processor/processors/1/single", json{eos, eos, sequence}, "\"post_processor\"");
  refused("/post_processor/processors/1/single/0/SpecialToken/id", "no", "token that begins a text is no");
  refused("/added_tokens/3/lstrip", true, "added token \"<think>\": \"lstrip\" is true");
  refused("/added_tokens/3/normalized", true, "\"normalized\"");
  refused("/added_tokens/3/id", 2, "token id 2 is given to several texts");
  refused("/added_tokens/3/id", 1 << 20, "the id of added token \"<think>\"");
  refused("/model/vocab/a", -1, "the id of \"a\"");
  refused("/model/vocab/a", 3.5, "the id of \"a\"");
  refused("/model/vocab/a b", 345, "letters that stand for bytes");
  refused("/model/merges/0", json{"a", "\u00e9"}, "pieces of the vocabulary");
  refused("/model/merges/0", "ab", "two texts with a space between them");
  refused("/model/merges/0", 3, "merge 0 is 3");
}

TEST_CASE("a folder's tokenizer is tokenizer.model or tokenizer.json, and others are named") {
  const engine_tests::temporary_folder folder;
  const auto config = [&](int rows) {
    folder.write(
        "config.json",
        R"({"hidden_size":64,"intermediate_size":64,"num_hidden_layers":1,"num_attention_heads":1,"vocab_size":)" +
            std::to_string(rows) + "}");
  };
  const auto load = [&] { return engine::tokenizer::of_model(folder.path()); };
  config(352);
  CHECK_THROWS_WITH(
      load(), contains("none that is known; expected tokenizer.json with byte-level byte pairs, or tokenizer.model"));
  folder.write("merges.txt", "a b");
  CHECK_THROWS_WITH(load(), contains("is merges.txt; expected tokenizer.json"));
  folder.write("tokenizer.model", "IQ== 0\nIg== 1\n");
  CHECK_THROWS_WITH(load(), contains("tokenizer.model is a list of tiktoken; expected tokenizer.json"));
  folder.write("tokenizer.json", engine::read_text_file(fixtures + "smollm.json"));
  CHECK(load().vocab_size() == 352);  // with unused rows, as models have them
  const engine::token_t unused = 350;
  CHECK(load().decode({&unused, 1}).empty());
  config(340);
  CHECK(load().vocab_size() == 345);  // which the weights refuse
  config(345 + 1024);
  CHECK(load().vocab_size() == 345);
  folder.write("tokenizer.json", "{}");
  CHECK_THROWS_WITH(load(), contains("tokenizer.json: \"model\""));
}
