#include "json_lines.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>

#include "tool/methods/values.hpp"

namespace tool {

using nlohmann::json;

void for_each_object(std::string_view text, std::string_view source, std::string_view form,
                     const std::function<void(const json&, const std::string&)>& use) {
  std::size_t number = 0, objects = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = trimmed(text.substr(begin, end - begin));
    begin = end + 1;
    ++number;
    if (line.empty()) continue;
    const std::string place = std::string(source) + ", line " + std::to_string(number);
    const json object = json::parse(line, nullptr, false);
    tessera::require(object.is_object(), place, object.is_discarded() ? "no JSON" : object.type_name(), form,
                     "write one JSON object a line");
    use(object, place);
    ++objects;
  }
  tessera::require(objects > 0, "file " + std::string(source), "empty",
                   "at least one line of the form " + std::string(form), "write one JSON object a line");
}

const json& required_value(const json& object, const char* key, const std::string& place, const char* wanted) {
  const auto found = object.find(key);
  tessera::require(found != object.end(), place + ": \"" + key + "\"", "missing", wanted,
                   "give every line the keys of its form");
  return *found;
}

std::string required_text(const json& object, const char* key, const std::string& place) {
  const json& value = required_value(object, key, place, "text");
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  tessera::require(!trimmed(text).empty(), place + ": \"" + key + "\"", value.is_string() ? "empty" : value.type_name(),
                   "text", "give every line the keys of its form");
  return text;
}

}  // namespace tool
