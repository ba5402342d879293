// Conversations with expected answers: made by the tool (document.hpp) or anybody's, from a JSON Lines file.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tool {

struct turn {
  std::string prompt;                     ///< appended to the conversation as it stands
  std::string answer;                     ///< decides how much may be generated
  std::vector<std::string> references{};  ///< what the generated text is compared with; none: `answer`
};

struct conversation {
  std::string family;
  std::vector<turn> turns;
  std::size_t document = 0;  ///< neighbours of the same number ask about one document, each by itself; 0: none is known
};

/// How a document and a question become a prompt: "{context}\n\n{input}\nAnswer:". Later questions over the same document get
/// what stands behind {context}.
struct prompt_template {
  std::string before, between, behind;

  /// A backslash and an n are a line break. Errors: {context} and {input} do not stand in it once each, in this order.
  static prompt_template parsed(std::string_view text);
  std::string first(std::string_view context, std::string_view input) const;
  std::string later(std::string_view input) const;
};
inline constexpr const char* usual_template = "{context}\n\n{input}\nAnswer:";

/// Reads JSON Lines, one conversation a line, in one of these forms; which one follows from the keys of each line:
/// - ours: {"family": "...", "turns": [{"prompt": "...", "answer": "..."}, ...]};
/// - LongBench's: "context", "input", "answers", "dataset" (the family), "language"; its other keys are not read. The template makes
///   the prompt. An empty "input" is one, as of its summaries.
/// - RULER's: "input", "outputs", and perhaps "answer_prefix", which goes behind the input. The family is `family`.
/// - SCBench's: "context" and "multi_turns", each with "input" and "answer"; perhaps "task" (the family, else `family`). The template
///   makes the prompts. `separately`: a conversation for each of its turns, of one document.
/// Empty lines are skipped. Errors: a line of no such form, an empty prompt or answer, a key that is missing or of another type, a
/// language whose words no white space parts, no line at all; the message names `source` and the line.
std::vector<conversation> parse_questions(std::string_view text, std::string_view source,
                                          std::string_view family = "questions",
                                          const prompt_template& how = prompt_template::parsed(usual_template),
                                          bool separately = false);

/// The family of lines that name none is the file's name, or its folder's where the file is called validation, test or train.
std::vector<conversation> load_questions(const std::filesystem::path& path, const prompt_template& how,
                                         bool separately = false);

}  // namespace tool
