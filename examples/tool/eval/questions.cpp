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

constexpr std::string_view own_form = R"({"family": "...", "turns": [{"prompt": "...", "answer": "..."}, ...]})";
constexpr std::string_view forms =
    R"({"family": ..., "turns": [...]}, LongBench's {"context", "input", "answers", "dataset"}, RULER's {"input", "outputs"} or SCBench's {"context", "multi_turns"})";

const json& required_array(const json& object, const char* key, const std::string& place) {
  const json& items = required_value(object, key, place, "an array that is not empty");
  tessera::require(
      items.is_array() && !items.empty(), place + ": \"" + key + "\"", items.is_array() ? "empty" : items.type_name(),
      "an array that is not empty",
      "write one JSON object a line, as " + std::string(key == std::string_view("turns") ? own_form : forms));
  return items;
}

/// Text, which may be empty.
std::string any_text(const json& object, const char* key, const std::string& place) {
  const json& value = required_value(object, key, place, "text");
  tessera::require(value.is_string(), place + ": \"" + key + "\"", value.type_name(), "text",
                   "give every line the keys of its form");
  return value.get<std::string>();
}

/// Answers as text: those of RULER and SCBench may be numbers.
std::vector<std::string> answer_texts(const json& value, const std::string& place) {
  std::vector<std::string> all;
  for (const json& item : value.is_array() ? value : json::array({value})) {
    const std::string text = item.is_string() ? item.get<std::string>() : item.is_number() ? item.dump() : "";
    tessera::require(!trimmed(text).empty(), place, item.is_string() ? "empty" : item.type_name(), "text or a number",
                     "give every question an answer");
    all.push_back(text);
  }
  tessera::require(!all.empty(), place, "empty", "at least one answer", "give every question an answer");
  return all;
}

std::string longest(const std::vector<std::string>& texts) {
  return *std::ranges::max_element(texts, {}, [](const std::string& text) { return text.size(); });
}

conversation own(const json& object, const std::string& place) {
  conversation result{required_text(object, "family", place), {}};
  for (const json& item : required_array(object, "turns", place)) {
    const std::string turn_place = place + ", turn " + std::to_string(result.turns.size() + 1);
    tessera::require(item.is_object(), turn_place, item.type_name(), R"({"prompt": "...", "answer": "..."})",
                     "write every turn as an object");
    result.turns.push_back({required_text(item, "prompt", turn_place), required_text(item, "answer", turn_place)});
  }
  return result;
}

conversation of_longbench(const json& object, const std::string& place, const prompt_template& how) {
  if (const auto language = object.find("language"); language != object.end()) {
    tessera::require(*language != "zh", place + ": \"language\"", "zh", "a language whose words white space parts",
                     "leave these lines out: their scores need a dictionary of words");
  }
  const std::vector<std::string> answers =
      answer_texts(required_array(object, "answers", place), place + ": \"answers\"");
  return {required_text(object, "dataset", place),
          {{how.first(required_text(object, "context", place), any_text(object, "input", place)), longest(answers),
            answers}}};
}

conversation of_ruler(const json& object, const std::string& place, std::string_view family) {
  const std::vector<std::string> outputs =
      answer_texts(required_array(object, "outputs", place), place + ": \"outputs\"");
  const std::string prefix = object.contains("answer_prefix") ? any_text(object, "answer_prefix", place) : "";
  return {std::string(family), {{required_text(object, "input", place) + prefix, joined(outputs), outputs}}};
}

// One conversation, or one for each of its questions.
std::vector<conversation> of_scbench(const json& object, const std::string& place, std::string_view family,
                                     const prompt_template& how, std::size_t document, bool separately) {
  conversation together{object.contains("task") ? required_text(object, "task", place) : std::string(family), {}};
  std::vector<conversation> apart;
  const std::string context = required_text(object, "context", place);
  for (const json& item : required_array(object, "multi_turns", place)) {
    const std::string turn_place = place + ", turn " + std::to_string(together.turns.size() + 1);
    tessera::require(item.is_object(), turn_place, item.type_name(), R"({"input": "...", "answer": "..."})",
                     "write every turn as an object");
    const std::string input = required_text(item, "input", turn_place);
    const auto answers =
        answer_texts(required_value(item, "answer", turn_place, "an answer"), turn_place + ": \"answer\"");
    const bool first = separately || together.turns.empty();
    together.turns.push_back({first ? how.first(context, input) : how.later(input), joined(answers), answers});
    apart.push_back({together.family, {together.turns.back()}, document});
  }
  return separately ? apart : std::vector<conversation>{together};
}

}  // namespace

prompt_template prompt_template::parsed(std::string_view given) {
  std::string text;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const bool is_break = given.substr(i, 2) == "\\n";
    text += is_break ? '\n' : given[i];
    i += is_break;
  }
  constexpr std::string_view context = "{context}", input = "{input}";
  const std::size_t first = text.find(context), second = text.find(input);
  const bool both = first != text.npos && second != text.npos && first < second && text.rfind(context) == first &&
                    text.rfind(input) == second;
  tessera::require(both, "--question-template", "'" + engine::printable(given) + "'",
                   "{context} and, behind it, {input}, once each", "write where the document and the question go");
  const std::size_t end = first + context.size();
  return {text.substr(0, first), text.substr(end, second - end), text.substr(second + input.size())};
}

std::string prompt_template::first(std::string_view context, std::string_view input) const {
  return before + std::string(context) + later(input);
}
std::string prompt_template::later(std::string_view input) const { return between + std::string(input) + behind; }

std::vector<conversation> parse_questions(std::string_view text, std::string_view source, std::string_view family,
                                          const prompt_template& how, bool separately) {
  std::vector<conversation> all;
  std::size_t documents = 0;
  for_each_object(text, source, forms, [&](const json& object, const std::string& place) {
    const auto has = [&](const char* key) { return object.contains(key); };
    if (has("turns") || has("family")) return all.push_back(own(object, place));
    if (has("multi_turns")) {
      auto asked = of_scbench(object, place, family, how, ++documents, separately);
      return void(all.insert(all.end(), asked.begin(), asked.end()));
    }
    if (has("answers") || has("dataset")) return all.push_back(of_longbench(object, place, how));
    if (has("outputs")) return all.push_back(of_ruler(object, place, family));
    tessera::fail(place, "of no known form", forms, "give every line the keys of one form");
  });
  return all;
}

std::vector<conversation> load_questions(const std::filesystem::path& path, const prompt_template& how,
                                         bool separately) {
  if (path == "-") return parse_questions(engine::read_text_file(path), "standard input", "questions", how, separately);
  std::string family = path.stem().string();
  if ((family == "validation" || family == "test" || family == "train") && path.has_parent_path())
    family = path.parent_path().filename().string();
  return parse_questions(engine::read_text_file(path), engine::printable(path.native()), engine::printable(family), how,
                         separately);
}

}  // namespace tool
