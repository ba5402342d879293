#include "tokenizer_json.hpp"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"

namespace engine {
namespace {

using nlohmann::json;
using tessera::fail;
using tessera::require;

constexpr std::string_view cure = "use a model with such a tokenizer, or a folder with SentencePiece's tokenizer.model";
constexpr std::string_view complete = "download the file again";
constexpr std::size_t most_unused = 1 << 16;  // ids without a token, so that a short file takes no large memory

// The expressions of the pre-tokenizers, as the files spell them.
constexpr std::string_view llama3_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view qwen2_words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Only plain values are spelt out: hostile nesting would exhaust the stack.
std::string shown(const json& value) {
  return value.is_structured() ? value.type_name()
                               : printable(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

// The value of `key`; null where there is none, or no object.
const json& value_of(const json& object, const char* key) {
  static const json null;
  if (!object.is_object()) return null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

bool is_type(const json& value, std::string_view type) {
  const json& own = value_of(value, "type");
  return own.is_string() && own.get_ref<const std::string&>() == type;
}

// A flag with the default that the tokenizers library has for it.
bool flag(const json& object, const char* key, bool fallback) {
  const json& value = value_of(object, key);
  if (value.is_null()) return fallback;
  require(value.is_boolean(), std::string("\"") + key + "\"", shown(value), "true or false", complete);
  return value.get<bool>();
}

const std::string& text_of(const json& value, const std::string& what) {
  require(value.is_string(), what, shown(value), "a text", complete);
  return value.get_ref<const std::string&>();
}

// ByteLevel without a space before a text; `cuts`: whether it cuts words by GPT-2's expression.
bool is_byte_level(const json& part, bool cuts) {
  return is_type(part, "ByteLevel") && !flag(part, "add_prefix_space", true) && flag(part, "use_regex", true) == cuts;
}
bool is_split(const json& part, std::string_view words) {
  if (!is_type(part, "Split") || flag(part, "invert", false)) return false;
  const json& expression = value_of(value_of(part, "pattern"), "Regex");
  return value_of(part, "behavior") == "Isolated" && expression.is_string() &&
         expression.get_ref<const std::string&>() == words;
}

word_rule rule_of(const json& part) {
  const auto known = [&]() -> std::optional<word_rule> {
    if (is_byte_level(part, true)) return word_rule::gpt2;
    const json& parts = value_of(part, "pretokenizers");
    if (!is_type(part, "Sequence") || !parts.is_array() || parts.size() != 2) return std::nullopt;
    if (is_type(parts[0], "Digits") && flag(parts[0], "individual_digits", false) && is_byte_level(parts[1], true))
      return word_rule::smollm;
    if (!is_byte_level(parts[1], false)) return std::nullopt;
    if (is_split(parts[0], llama3_words)) return word_rule::llama3;
    if (is_split(parts[0], qwen2_words)) return word_rule::qwen2;
    return std::nullopt;
  }();
  if (!known)
    fail("\"pre_tokenizer\"", is_type(part, "Sequence") ? "a sequence of other parts or settings" : shown(part),
         "ByteLevel as GPT-2 has it, Digits and ByteLevel as SmolLM has them, or Split and ByteLevel with the "
         "expression of "
         "Llama 3 or Qwen 2",
         cure);
  return *known;
}

bool composes(const json& normalizer) {
  require(normalizer.is_null() || is_type(normalizer, "NFC"), "\"normalizer\"", shown(normalizer), "null or NFC", cure);
  return !normalizer.is_null();
}

// What the model says beside its vocabulary.
void require_plain_model(const json& model) {
  require(is_type(model, "BPE"), "\"model\"", shown(value_of(model, "type")), "BPE over letters that stand for bytes",
          cure);
  require(value_of(model, "dropout").is_null() || value_of(model, "dropout") == 0, "\"dropout\"",
          shown(value_of(model, "dropout")), "null", cure);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    require(value_of(model, key).is_null() || value_of(model, key) == "", std::string("\"") + key + "\"",
            shown(value_of(model, key)), "null", cure);
  require(!flag(model, "byte_fallback", false), "\"byte_fallback\"", "true", "false, as a byte-level tokenizer has it",
          cure);
}

class table_maker {
 public:
  /// Of a file with so many tokens.
  explicit table_maker(std::size_t tokens) : most_ids_(tokens + most_unused) {}

  void add(const std::string& text, token_t id, piece_kind kind) {
    const auto i = std::size_t(id);
    if (tables.texts.size() <= i) {
      tables.texts.resize(i + 1);
      tables.kinds.resize(i + 1, piece_kind::unused);
    }
    require(tables.kinds[i] == piece_kind::unused || (kind != piece_kind::bytes && tables.texts[i] == text),
            "token id " + std::to_string(id), "given to several texts", "one text an id", complete);
    tables.texts[i] = text;
    tables.kinds[i] = kind;
  }

  void add_vocabulary(const json& vocabulary) {
    require(vocabulary.is_object(), "\"vocab\"", shown(vocabulary), "an object from text to id", complete);
    for (const auto& [text, id] : vocabulary.items())
      add(text, id_of(id, "the id of \"" + printable(text) + "\""), piece_kind::bytes);
  }

  // The library finds texts that are not normalized before the others; one kind alone is found as here.
  void add_added(const json& added) {
    if (added.is_null()) return;
    require(added.is_array(), "\"added_tokens\"", shown(added), "a list", complete);
    std::optional<bool> normalized;
    for (const json& token : added) {
      require(token.is_object(), "an item of \"added_tokens\"", shown(token), "an object", complete);
      const std::string& text = text_of(value_of(token, "content"), "\"content\" of an added token");
      const std::string name = "added token \"" + printable(text) + "\"";
      const token_t id = id_of(value_of(token, "id"), "the id of " + name);
      if (flag(token, "special", false)) {
        add(text, id, piece_kind::control);
        continue;
      }
      for (const char* key : {"single_word", "lstrip", "rstrip"})
        require(!flag(token, key, false), name + ": \"" + key + "\"", "true", "false where it is not special", cure);
      const bool own = flag(token, "normalized", true);
      require(normalized.value_or(own) == own, name + ": \"normalized\"", own ? "true" : "false",
              "the same for all added tokens that are not special", cure);
      normalized = own;
      add(text, id, piece_kind::added);
    }
  }

  void add_merges(const json& merges) {
    require(merges.is_array(), "\"merges\"", shown(merges), "a list", complete);
    for (const json& merge : merges) {
      const std::string what = "merge " + std::to_string(tables.merges.size());
      if (merge.is_array() && merge.size() == 2) {
        tables.merges.emplace_back(text_of(merge[0], what), text_of(merge[1], what));
        continue;
      }
      require(merge.is_string(), what, shown(merge), "two texts", complete);
      const std::string& both = merge.get_ref<const std::string&>();
      const std::size_t space = both.find(' ');
      require(space != std::string::npos, what, printable(both), "two texts with a space between them", complete);
      tables.merges.emplace_back(both.substr(0, space), both.substr(space + 1));
    }
  }

  token_t control(const std::string& text) const {
    for (std::size_t i = 0; i < tables.texts.size(); ++i)
      if (tables.kinds[i] == piece_kind::control && tables.texts[i] == text) return token_t(i);
    fail("token that begins a text", printable(text), "a special token of \"added_tokens\"", complete);
  }

  byte_pair_tables tables;

 private:
  token_t id_of(const json& value, const std::string& what) const {
    const bool fits = value.is_number_unsigned() && value.get<std::uint64_t>() < most_ids_;
    require(fits, what, shown(value), "below the number of tokens and " + std::to_string(most_unused), complete);
    return value.get<token_t>();
  }

  std::size_t most_ids_;
};

// The token that begins every text, where the processor puts one there and nothing else.
std::optional<std::string> beginning(const json& processor) {
  if (processor.is_null() || is_type(processor, "ByteLevel")) return std::nullopt;
  const json* pattern = &processor;
  if (is_type(processor, "Sequence")) {
    const json& parts = value_of(processor, "processors");
    const bool known = parts.is_array() && parts.size() == 2 && is_type(parts[0], "ByteLevel");
    if (known) pattern = &parts[1];
  }
  const json& single = value_of(*pattern, "single");
  const std::size_t size = single.is_array() ? single.size() : 0;
  const bool known = is_type(*pattern, "TemplateProcessing") && size >= 1 && size <= 2 &&
                     value_of(value_of(single[size - 1], "Sequence"), "id") == "A" &&
                     (size == 1 || value_of(value_of(single[0], "SpecialToken"), "id").is_string());
  require(known, "\"post_processor\"", shown(value_of(processor, "type")),
          "ByteLevel, or one that puts at most one token before a text and none behind it", cure);
  if (size == 1) return std::nullopt;
  return value_of(value_of(single[0], "SpecialToken"), "id").get<std::string>();
}

// Where a byte has no piece the library writes the unknown token, if there is one.
void require_every_byte(const json& model, const byte_pair_tables& tables) {
  if (value_of(model, "unk_token").is_null()) return;
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tables.texts.size(); ++i) {
    const std::string& text = tables.texts[i];  // a letter that stands for a byte has one byte, or two
    const bool is_letter = text.size() == 1 || (text.size() == 2 && static_cast<unsigned char>(text[0]) >= 0xc0);
    bytes += tables.kinds[i] == piece_kind::bytes && is_letter;
  }
  require(bytes == 256, "\"unk_token\"", shown(value_of(model, "unk_token")),
          "null where a byte has no token of its own", cure);
}

}  // namespace

byte_pair_tables parse_tokenizer_json(std::string_view text) {
  json file;
  try {
    file = json::parse(text.begin(), text.end());
  } catch (const json::exception& problem) {
    fail("tokenizer", problem.what(), "a JSON object", complete);
  }
  require(file.is_object(), "tokenizer", shown(file), "a JSON object", complete);
  const json& model = value_of(file, "model");
  require_plain_model(model);
  table_maker made(value_of(model, "vocab").size() + value_of(file, "added_tokens").size());
  made.tables.rule = rule_of(value_of(file, "pre_tokenizer"));
  made.tables.is_composed = composes(value_of(file, "normalizer"));
  made.tables.takes_whole_words = flag(model, "ignore_merges", false);
  require(is_type(value_of(file, "decoder"), "ByteLevel"), "\"decoder\"", shown(value_of(file, "decoder")), "ByteLevel",
          cure);
  made.add_vocabulary(value_of(model, "vocab"));
  made.add_merges(value_of(model, "merges"));
  made.add_added(value_of(file, "added_tokens"));
  require_every_byte(model, made.tables);
  if (const auto first = beginning(value_of(file, "post_processor"))) made.tables.bos = made.control(*first);
  return std::move(made.tables);
}

byte_pair_tables read_tokenizer_json(const std::filesystem::path& path) {
  const std::string text = read_text_file(path);
  try {
    return parse_tokenizer_json(text);
  } catch (const tessera::error& problem) {
    throw tessera::error("file " + printable(path.native()) + ": " + problem.what());
  }
}

}  // namespace engine
