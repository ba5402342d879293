#include "questions.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

using nlohmann::json;

// The text under `key`. Errors: no such key, no string, or nothing but white space.
std::string required_text(const json& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  const bool is_text = found != object.end() && found->is_string();
  const std::string text = is_text ? found->get<std::string>() : "";
  tessera::require(!trimmed(text).empty(), place + ": \"" + key + "\"",
                   is_text                 ? "empty"
                   : found == object.end() ? "missing"
                                           : found->type_name(),
                   "text", "give every line a family, and every turn a prompt and an answer");
  return text;
}

conversation parse_conversation(std::string_view line, const std::string& place) {
  const json object = json::parse(line, nullptr, false);
  constexpr std::string_view form = R"({"family": "...", "turns": [{"prompt": "...", "answer": "..."}, ...]})";
  tessera::require(object.is_object(), place, object.is_discarded() ? "no JSON" : object.type_name(), form,
                   "write one JSON object a line");
  conversation result{required_text(object, "family", place), {}};
  const auto turns = object.find("turns");
  tessera::require(turns != object.end() && turns->is_array() && !turns->empty(), place + ": \"turns\"",
                   turns == object.end() ? "missing"
                   : turns->is_array()   ? "empty"
                                         : turns->type_name(),
                   "an array of at least one turn", "write one JSON object a line, as " + std::string(form));
  for (const json& item : *turns) {
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
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = trimmed(text.substr(begin, end - begin));
    ++number;
    if (!line.empty()) {
      all.push_back(parse_conversation(line, std::string(source) + ", line " + std::to_string(number)));
    }
    begin = end + 1;
  }
  tessera::require(!all.empty(), "questions file " + std::string(source), "empty", "at least one question",
                   "write one JSON object a line");
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
