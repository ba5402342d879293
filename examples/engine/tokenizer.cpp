#include "tokenizer.hpp"

#include <sentencepiece_processor.h>

#include <tessera/core/error.hpp>
#include <utility>

#include "engine/files/input_file.hpp"

namespace engine {
namespace {

std::optional<token_t> if_defined(int id) { return id < 0 ? std::nullopt : std::optional<token_t>(id); }

}  // namespace

tokenizer::tokenizer(std::unique_ptr<sentencepiece::SentencePieceProcessor> processor)
    : processor_(std::move(processor)) {
  for (token_t id = 0; id < vocab_size(); ++id) {
    const std::string text = decode({&id, 1});
    if (text.find('\n') != std::string::npos) newline_tokens_.push_back(id);
  }
}

tokenizer::tokenizer(tokenizer&&) noexcept = default;
tokenizer& tokenizer::operator=(tokenizer&&) noexcept = default;
tokenizer::~tokenizer() = default;

tokenizer tokenizer::load(const std::filesystem::path& path) {
  // Read here rather than by the library, which reports a missing file through its log.
  const std::string bytes = read_text_file(path);
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  const auto status = processor->LoadFromSerializedProto(bytes);
  if (!status.ok())
    tessera::fail("file " + printable(path.native()), status.ToString(), "a SentencePiece model",
                  "pass a tokenizer.model");
  return tokenizer(std::move(processor));
}

std::vector<token_t> tokenizer::encode(std::string_view text) const {
  std::vector<int> ids;
  const auto status = processor_->Encode({text.data(), text.size()}, &ids);
  if (!status.ok()) tessera::fail("text", status.ToString(), "text that SentencePiece can encode", "pass UTF-8 text");
  return {ids.begin(), ids.end()};
}

std::string tokenizer::decode(std::span<const token_t> tokens) const {
  for (const token_t id : tokens)
    tessera::require(id >= 0 && id < vocab_size(), "token id", id, "an id in [0, " + std::to_string(vocab_size()) + ")",
                     "use the tokenizer that the model was trained with");
  std::string text;
  const auto status = processor_->Decode(std::vector<int>(tokens.begin(), tokens.end()), &text);
  if (!status.ok())
    tessera::fail("tokens", status.ToString(), "tokens that SentencePiece can decode", "check the tokenizer");
  return text;
}

std::optional<token_t> tokenizer::bos() const { return if_defined(processor_->bos_id()); }
std::optional<token_t> tokenizer::eos() const { return if_defined(processor_->eos_id()); }
token_t tokenizer::vocab_size() const { return processor_->GetPieceSize(); }

}  // namespace engine
