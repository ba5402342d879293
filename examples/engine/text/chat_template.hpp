// How a model's conversations are written: who speaks, where a turn begins and where it ends.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config.hpp"
#include "engine/tokenizer.hpp"

namespace engine {

/// The two ways of writing turns that are known.
enum class chat_style { chatml, llama3 };

/// What a template says of a conversation of a user and an assistant. Tools, images and thoughts are left out.
struct chat_template {
  chat_style style = chat_style::chatml;
  bool begins_with_bos = false;
  bool trims = false;                          ///< white space at the ends of what a person writes goes
  std::string preamble{};                      ///< what the system's turn begins with; it is then always there
  std::optional<std::string> system_prompt{};  ///< the default; none: no turn of the system unless one is given
};

/// Recognises a template, which is a Jinja program, by the marks that it writes and by what stands between them.
/// Errors   one that writes turns otherwise than ChatML and Llama 3, or that changes them in a way that is not known:
///          tessera::error that names what is accepted.
chat_template recognise_template(std::string_view text);

/// The text of a model's template: of a folder chat_template.jinja, or tokenizer_config.json's "chat_template"; of a GGUF
/// file "tokenizer.chat_template". None where the model has none. Errors: an unreadable or malformed file.
std::optional<std::string> template_text(const std::filesystem::path& model);

/// The tokens of a conversation. A mark is one token; what a person writes never becomes one, whatever it holds.
class chat {
 public:
  /// `words` must outlive the chat; each of `eos` ends a reply, too. Errors: a vocabulary without a mark of the template.
  chat(chat_template turns, const tokenizer& words, std::span<const token_t> eos);

  const chat_template& turns() const { return turns_; }

  /// What a conversation begins with: the system's turn, if there is one, a person's, and what the reply follows.
  std::vector<token_t> first_turn(const std::optional<std::string>& system_prompt, std::string_view message) const;

  /// What follows a reply of the model, which the cache holds but for its last token.
  std::vector<token_t> next_turn(std::span<const token_t> reply, std::string_view message) const;

  /// The tokens that end a reply, the template's own first.
  std::span<const token_t> ends() const { return ends_; }

 private:
  class writer;
  void write_turn(writer& to, std::string_view speaker, std::string_view message) const;
  void write_person(writer& to, std::string_view message) const;
  token_t mark(std::string_view name) const;

  chat_template turns_;
  const tokenizer* words_;
  std::vector<token_t> ends_;
};

}  // namespace engine
