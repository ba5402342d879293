// JSON Lines: one object a line, with errors that name the line.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace tool {

/// Calls `use(object, place)` for every line that is not empty; `place` names the source and the line.
/// Errors   a line that is no object of the form that `form` shows; no object at all.
void for_each_object(std::string_view text, std::string_view source, std::string_view form,
                     const std::function<void(const nlohmann::json&, const std::string&)>& use);

/// The value under `key`. Errors: no such key; the message begins with `place`.
const nlohmann::json& required_value(const nlohmann::json& object, const char* key, const std::string& place,
                                     const char* wanted);

/// The text under `key`. Errors: no such key, no string, or nothing but white space.
std::string required_text(const nlohmann::json& object, const char* key, const std::string& place);

}  // namespace tool
