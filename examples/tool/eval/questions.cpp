#include "questions.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "tool/forms/json_lines.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

using nlohmann::json;

constexpr std::string_view form = R"({"family": "...", "turns": [{"prompt": "...", "answer": "..."}, ...]})";

conversation parse_conversation(const json& object, const std::string& place) {
  conversation result{required_text(object, "family", place), {}};
  const json& turns = required_value(object, "turns", place, "an array of at least one turn");
  tessera::require(turns.is_array() && !turns.empty(), place + ": \"turns\"",
                   turns.is_array() ? "empty" : turns.type_name(), "an array of at least one turn",
                   "write one JSON object a line, as " + std::string(form));
  for (const json& item : turns) {
    const std::string turn_place = place + ", turn " + std::to_string(result.turns.size() + 1);
    tessera::require(item.is_object(), turn_place, item.type_name(), R"({"prompt": "...", "answer": "..."})",
                     "write every turn as an object");
    result.turns.push_back({required_text(item, "prompt", turn_place), required_text(item, "answer", turn_place)});
  }
  return result;
}

}  // namespace

std::vector<conversation> parse_questions(std::string_view text, std::string_view source) {
  std::vector<conversation> all;
  for_each_object(text, source, form, [&](const json& object, const std::string& place) {
    all.push_back(parse_conversation(object, place));
  });
  return all;
}

std::vector<conversation> load_questions(const std::filesystem::path& path) {
  return parse_questions(engine::read_text_file(path),
                         path == "-" ? "standard input" : engine::printable(path.native()));
}

bool answers(std::string_view generated, std::string_view answer) {
  return trimmed(generated).starts_with(trimmed(answer));
}

}  // namespace tool
