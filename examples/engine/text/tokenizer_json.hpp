// Hugging Face's tokenizer.json, of byte-level byte-pair tokenizers.
#pragma once

#include <filesystem>
#include <string_view>

#include "byte_pairs.hpp"

namespace engine {

/// Reads the text of a tokenizer.json: a model BPE over letters that stand for bytes, cut by the pre-tokenizer of GPT-2,
/// SmolLM, Llama 3 or Qwen 2 to the letter; no normalizer or NFC; control tokens, and added ones that are plain texts; a
/// token that begins every text, or none.
/// Errors   no JSON, any other part or setting, ids that are given twice or out of range: tessera::error that names what is
///          accepted. What `byte_pairs` refuses is left to it.
byte_pair_tables parse_tokenizer_json(std::string_view text);

/// Reads a file. Errors: unreadable, or as above; the message carries the path.
byte_pair_tables read_tokenizer_json(const std::filesystem::path& path);

}  // namespace engine
