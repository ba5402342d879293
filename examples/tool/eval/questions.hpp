// Conversations with expected answers: made by the tool (document.hpp) or anybody's, from a JSON Lines file.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tool {

struct turn {
  std::string prompt;  ///< appended to the conversation as it stands
  std::string answer;  ///< what the generated text must begin with, white space at the ends aside
};

struct conversation {
  std::string family;
  std::vector<turn> turns;
};

/// Reads JSON Lines, one conversation a line: {"family": "...", "turns": [{"prompt": "...", "answer": "..."}, ...]}.
/// Empty lines are skipped. Errors: a line that is no such object, an empty prompt or answer, no line at all; the
/// message names `source` and the line.
std::vector<conversation> parse_questions(std::string_view text, std::string_view source);

std::vector<conversation> load_questions(const std::filesystem::path& path);

/// Whether `generated` begins with `answer`, white space at the ends of both aside.
bool answers(std::string_view generated, std::string_view answer);

}  // namespace tool
