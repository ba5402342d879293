// The tokenizer of a GGUF file.
#include <map>
#include <tessera/core/error.hpp>

#include "byte_pairs.hpp"
#include "engine/files/input_file.hpp"

namespace engine {
namespace {

using tessera::require;

word_rule rule_of(const gguf_file& file) {
  const std::string& kind = file.text("tokenizer.ggml.model");
  require(kind == "gpt2", "tokenizer of the file", printable(kind), "gpt2, which is byte-level byte-pair encoding",
          "use a file with such a tokenizer, or a folder with tokenizer.model or tokenizer.json");
  const std::map<std::string, word_rule> rules{{"gpt-2", word_rule::gpt2},    {"default", word_rule::gpt2},
                                               {"smollm", word_rule::smollm}, {"llama-bpe", word_rule::llama3},
                                               {"llama3", word_rule::llama3}, {"qwen2", word_rule::qwen2}};
  const std::string& rule = file.text("tokenizer.ggml.pre");
  const auto found = rules.find(rule);
  require(found != rules.end(), "word rule of the file's tokenizer", printable(rule),
          "gpt-2, smollm, llama-bpe, llama3 or qwen2", "use a file with such a tokenizer");
  return found->second;
}

piece_kind kind_of(std::int64_t type) {
  switch (type) {
    case 1:
      return piece_kind::bytes;
    case 4:
      return piece_kind::added;
    case 5:
      return piece_kind::unused;
    default:
      return piece_kind::control;
  }
}

std::optional<token_t> special(const gguf_file& file, const char* key, std::size_t size) {
  if (!file.value(key)) return std::nullopt;
  const std::int64_t id = file.count(key);
  require(id >= 0 && id < std::int64_t(size), std::string("gguf: \"") + key + "\"", id, "a token of the vocabulary",
          "use a complete file");
  return token_t(id);
}

}  // namespace

std::unique_ptr<byte_pairs> byte_pairs::from(const gguf_file& file) {
  byte_pair_tables tables;
  tables.rule = rule_of(file);
  tables.takes_whole_words = tables.rule == word_rule::llama3;
  tables.is_composed = tables.rule == word_rule::qwen2;
  tables.texts = file.texts("tokenizer.ggml.tokens");
  const gguf_value* types = file.value("tokenizer.ggml.token_type");
  const auto* type_of = types ? std::get_if<std::vector<std::int64_t>>(types) : nullptr;
  require(!type_of || type_of->size() == tables.texts.size(), "gguf: \"tokenizer.ggml.token_type\"",
          type_of ? type_of->size() : 0, "one for each token, which are " + std::to_string(tables.texts.size()),
          "use a complete file");
  for (std::size_t id = 0; id < tables.texts.size(); ++id)
    tables.kinds.push_back(type_of ? kind_of((*type_of)[id]) : piece_kind::bytes);
  for (const std::string& merge : file.texts("tokenizer.ggml.merges")) {
    const std::size_t space = merge.find(' ');
    require(space != std::string::npos, "merge " + std::to_string(tables.merges.size()), printable(merge),
            "two pieces with a space between them", "use a complete file");
    tables.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  // Files of Llama 3 from before that key begin texts with bos, too.
  const gguf_value* adds = file.value("tokenizer.ggml.add_bos_token");
  const bool adds_bos =
      adds ? std::holds_alternative<bool>(*adds) && std::get<bool>(*adds) : tables.rule == word_rule::llama3;
  const auto bos = special(file, "tokenizer.ggml.bos_token_id", tables.texts.size());
  if (adds_bos) tables.bos = bos;
  tables.eos = special(file, "tokenizer.ggml.eos_token_id", tables.texts.size());
  return std::make_unique<byte_pairs>(std::move(tables));
}

}  // namespace engine
