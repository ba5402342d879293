#include "tokenizer.hpp"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <tessera/core/error.hpp>
#include <utility>

#include "engine/files/gguf.hpp"
#include "engine/files/input_file.hpp"
#include "engine/text/byte_pairs.hpp"
#include "engine/text/tokenizer_json.hpp"

namespace engine {
namespace {

std::optional<token_t> if_defined(int id) { return id < 0 ? std::nullopt : std::optional<token_t>(id); }

constexpr std::string_view delimiters[] = {".",      ",",      ";",      ":",      "!",      "?",      "\n",    "\r",
                                           "\u3002", "\uff0c", "\uff1b", "\uff1a", "\uff01", "\uff1f", "\u3001"};

// The bytes of a delimiter at the end of a text, 0 where there is none.
std::size_t delimiter_at_end(std::string_view text) {
  for (const std::string_view each : delimiters) {
    if (text.ends_with(each)) return each.size();
  }
  return 0;
}

std::string_view without_spaces_at_end(std::string_view text) {
  while (text.ends_with(' ') || text.ends_with('\t')) text.remove_suffix(1);
  return text;
}

bool is_nothing_but_delimiters(std::string_view text) {
  text = without_spaces_at_end(text);
  while (const std::size_t bytes = delimiter_at_end(text))
    text = without_spaces_at_end(text.substr(0, text.size() - bytes));
  return text.empty();
}

class sentence_pieces final : public vocabulary {
 public:
  explicit sentence_pieces(std::unique_ptr<sentencepiece::SentencePieceProcessor> processor)
      : processor_(std::move(processor)) {}
  std::vector<token_t> encode(std::string_view text) const override {
    std::vector<int> ids;
    const auto status = processor_->Encode({text.data(), text.size()}, &ids);
    if (!status.ok()) tessera::fail("text", status.ToString(), "text that SentencePiece can encode", "pass UTF-8 text");
    return {ids.begin(), ids.end()};
  }
  std::string decode(std::span<const token_t> tokens) const override {
    std::string text;
    const auto status = processor_->Decode(std::vector<int>(tokens.begin(), tokens.end()), &text);
    if (!status.ok())
      tessera::fail("tokens", status.ToString(), "tokens that SentencePiece can decode", "check the tokenizer");
    return text;
  }
  token_t size() const override { return processor_->GetPieceSize(); }
  std::optional<token_t> bos() const override { return if_defined(processor_->bos_id()); }
  std::optional<token_t> eos() const override { return if_defined(processor_->eos_id()); }
  std::optional<token_t> control(std::string_view name) const override {
    const int id = processor_->PieceToId({name.data(), name.size()});  // that of <unk> where there is none
    const bool is_it = processor_->IsControl(id) && processor_->IdToPiece(id) == name;
    return is_it ? std::optional<token_t>(id) : std::nullopt;
  }

 private:
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
};

// Whether a file is tiktoken's: lines of a token in base64, a space and its rank.
bool is_of_tiktoken(std::string_view bytes) {
  const std::string_view line = bytes.substr(0, std::min(bytes.find('\n'), bytes.size()));
  const std::size_t space = line.find(' ');
  constexpr std::string_view digits = "0123456789";
  constexpr std::string_view base64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=";
  return space != std::string_view::npos && space > 0 && space + 1 < line.size() && line.size() < 1000 &&
         line.substr(0, space).find_first_not_of(base64) == std::string_view::npos &&
         line.substr(space + 1).find_first_not_of(digits) == std::string_view::npos;
}

constexpr std::string_view accepted = "tokenizer.json with byte-level byte pairs, or tokenizer.model of SentencePiece";

// A folder's byte pairs. Models have more rows in their embedding than there are tokens, to a round number.
std::unique_ptr<vocabulary> byte_pairs_of(const std::filesystem::path& folder) {
  constexpr std::int32_t most_unused = 1024;
  const auto path = folder / "tokenizer.json";
  byte_pair_tables tables = read_tokenizer_json(path);
  const std::int32_t rows = load_config(folder / "config.json").vocab_size;
  const auto tokens = std::int32_t(tables.texts.size());
  if (tokens < rows && rows - tokens < most_unused) {
    tables.texts.resize(std::size_t(rows));
    tables.kinds.resize(std::size_t(rows), piece_kind::unused);
  }
  try {
    return std::make_unique<byte_pairs>(std::move(tables));
  } catch (const tessera::error& problem) {
    throw tessera::error("file " + printable(path.native()) + ": " + problem.what());
  }
}

[[noreturn]] void fail_without_tokenizer(const std::filesystem::path& folder) {
  std::string found = "none that is known";
  for (const char* name : {"vocab.json", "merges.txt", "vocab.txt", "spiece.model", "qwen.tiktoken", "tekken.json"})
    if (there(folder / name)) found = name;
  tessera::fail("tokenizer of the folder " + printable(folder.native()), found, accepted,
                "add tokenizer.json, as Hugging Face's tokenizers save it");
}

}  // namespace

tokenizer::tokenizer(std::unique_ptr<vocabulary> pieces) : pieces_(std::move(pieces)) {
  for (token_t id = 0; id < vocab_size(); ++id) {
    const std::string text = decode({&id, 1});
    if (text.find('\n') != std::string::npos) newline_tokens_.push_back(id);
    ends_segment_.push_back(delimiter_at_end(without_spaces_at_end(text)) > 0);
    delimiter_.push_back(ends_segment_.back() && is_nothing_but_delimiters(text));
  }
}

tokenizer::tokenizer(tokenizer&&) noexcept = default;
tokenizer& tokenizer::operator=(tokenizer&&) noexcept = default;
tokenizer::~tokenizer() = default;

tokenizer tokenizer::load(const std::filesystem::path& path) {
  // Read here rather than by the library, which reports a missing file through its log.
  const std::string bytes = read_text_file(path);
  auto processor = std::make_unique<sentencepiece::SentencePieceProcessor>();
  tessera::require(!is_of_tiktoken(bytes), "file " + printable(path.native()), "a list of tiktoken", accepted,
                   "take the folder with the model's tokenizer.json");
  const auto status = processor->LoadFromSerializedProto(bytes);
  if (!status.ok())
    tessera::fail("file " + printable(path.native()), status.ToString(), "a SentencePiece model",
                  "pass a tokenizer.model");
  return tokenizer(std::make_unique<sentence_pieces>(std::move(processor)));
}

tokenizer tokenizer::of_model(const std::filesystem::path& model) {
  if (!is_gguf(model)) {
    const auto pieces = model / "tokenizer.model";
    const bool has_pairs = there(model / "tokenizer.json");
    if (there(pieces) && !(has_pairs && is_of_tiktoken(read_text_file(pieces)))) return load(pieces);
    if (!has_pairs) fail_without_tokenizer(model);
    return tokenizer(byte_pairs_of(model));
  }
  try {
    return tokenizer(byte_pairs::from(gguf_file::open(model)));
  } catch (const tessera::error& problem) {
    const std::string said = problem.what(), name = "file " + printable(model.native());
    throw tessera::error(said.starts_with("file ") ? said : name + ": " + said);
  }
}

std::vector<token_t> tokenizer::encode(std::string_view text) const { return pieces_->encode(text); }

std::string tokenizer::decode(std::span<const token_t> tokens) const {
  for (const token_t id : tokens)
    tessera::require(id >= 0 && id < vocab_size(), "token id", id, "an id in [0, " + std::to_string(vocab_size()) + ")",
                     "use the tokenizer that the model was trained with");
  return pieces_->decode(tokens);
}

std::vector<std::uint8_t> tokenizer::boundaries(std::span<const token_t> tokens) const {
  (void)decode(tokens);  // every id is one
  std::vector<std::uint8_t> flags;
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    const bool goes_on = t + 1 < tokens.size() && delimiter_[std::size_t(tokens[t + 1])];
    flags.push_back(ends_segment_[std::size_t(tokens[t])] && !goes_on);
  }
  return flags;
}

std::optional<token_t> tokenizer::bos() const { return pieces_->bos(); }
std::optional<token_t> tokenizer::eos() const { return pieces_->eos(); }
std::optional<token_t> tokenizer::control(std::string_view name) const { return pieces_->control(name); }
token_t tokenizer::vocab_size() const { return pieces_->size(); }

}  // namespace engine
