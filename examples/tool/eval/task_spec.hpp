// The entries of a tasks file, and what families of questions are made of.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tessera/core/error.hpp>
#include <utility>
#include <vector>

#include "tasks.hpp"

namespace tool {

using strings = std::vector<std::string>;

struct code {
  std::string name, value;
};

/// A template with {name} and the like filled in.
inline std::string filled(std::string text,
                          std::initializer_list<std::pair<std::string_view, std::string_view>> values) {
  for (const auto& [name, value] : values) {
    const std::string slot = "{" + std::string(name) + "}";
    const std::size_t at = text.find(slot);
    if (at != std::string::npos) text.replace(at, slot.size(), value);
  }
  return text;
}

inline std::string joined_by(const strings& parts, const std::string& separator) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : separator) + part;
  return all;
}

/// A number of the file: how many of something a document has.
inline std::size_t counted(const nlohmann::json& value, const char* key) {
  constexpr std::size_t most = 1000;
  const bool fits = value.is_number_unsigned() && value.get<std::size_t>() >= 1 && value.get<std::size_t>() <= most;
  if (!fits) {
    tessera::fail(key, value.is_number() ? value.dump() : std::string(value.type_name()),
                  "a whole number from 1 to " + std::to_string(most), "start from examples/data/tasks.json");
  }
  return value.get<std::size_t>();
}

/// `count` different results of `draw`.
template <class Draw>
strings distinct(std::size_t count, const Draw& draw) {
  strings values;
  for (std::size_t tries = 0; values.size() < count; ++tries) {
    tessera::require(tries < std::min<std::size_t>(1000 * (count + 1), 100'000), "different values in the tasks file",
                     values.size(), "at least " + std::to_string(count), "lengthen its word list");
    const std::string value = draw();
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  }
  return values;
}

inline strings draw_numbers(random_source& random, std::size_t count) {
  return distinct(count, [&] { return std::to_string(10000 + random.below(90000)); });
}

/// Merges ordered lists at random; each keeps its order.
inline strings interleaved(random_source& random, const std::vector<strings>& groups) {
  std::vector<std::size_t> order, next(groups.size(), 0);
  for (std::size_t group = 0; group < groups.size(); ++group) order.insert(order.end(), groups[group].size(), group);
  random.shuffle(order);
  strings all;
  for (const std::size_t group : order) all.push_back(groups[group][next[group]++]);
  return all;
}

struct task_book::spec {
  nlohmann::json all;
  strings names, words;

  std::string text(const char* key) const { return all.at(key).get<std::string>(); }
  std::size_t number(std::string_view family, const char* key) const {
    return counted(all.at("families").at(std::string(family)).at(key), key);
  }
  std::string needle(const code& hidden) const {
    return filled(text("needle"), {{"name", hidden.name}, {"value", hidden.value}});
  }
  asked ask_one(const code& wanted) const { return {filled(text("ask_one"), {{"name", wanted.name}}), wanted.value}; }

  asked ask_several(const std::vector<code>& wanted) const {
    strings asked_for, values;
    for (const code& one : wanted) asked_for.push_back(one.name), values.push_back(one.value);
    return {filled(text("ask_names"), {{"names", joined_by(asked_for, text("separator"))}}),
            joined_by(values, text("separator"))};
  }
  asked ask_list(const std::vector<code>& wanted) const {
    strings asked_for, items;
    for (const code& one : wanted) {
      asked_for.push_back(one.name);
      items.push_back(filled(text("list_item"), {{"name", one.name}, {"value", one.value}}));
    }
    return {filled(text("ask_list"), {{"names", joined_by(asked_for, text("separator"))}}),
            joined_by(items, text("list_separator"))};
  }

  // Codes are words, not digits: the first one is what the prompt's last token has to find.
  strings draw_values(random_source& random, std::size_t count) const {
    const std::size_t parts = counted(all.at("value_words"), "value_words");
    return distinct(count, [&] { return joined_by(random.sample(words, parts), " "); });
  }

  std::vector<code> draw_codes(random_source& random, std::size_t count) const {
    const strings drawn = random.sample(names, count), values = draw_values(random, count);
    std::vector<code> codes;
    for (std::size_t i = 0; i < count; ++i) codes.push_back({drawn[i], values[i]});
    return codes;
  }
  strings needles(const std::vector<code>& codes) const {
    strings sentences;
    for (const code& hidden : codes) sentences.push_back(needle(hidden));
    return sentences;
  }
};

}  // namespace tool
