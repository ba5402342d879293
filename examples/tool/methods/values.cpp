#include "values.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <concepts>

#include "engine/files/input_file.hpp"

namespace tool {
namespace {

template <class Number>
bool parses_whole(std::string_view text, Number& value) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  return problem == std::errc{} && end == text.data() + text.size();
}

std::string quoted(std::string_view text) { return "'" + engine::printable(text, 80) + "'"; }

// Letters to insert, delete or replace on the way from one word to the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::int64_t parse_count(std::string_view name, std::string_view text, std::int64_t least, std::int64_t most) {
  std::int64_t value = 0;
  const bool is_number = parses_whole(text, value);
  const std::string allowed = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  tessera::require(is_number && value >= least && value <= most, name, quoted(text), allowed,
                   "see --help for what it counts");
  return value;
}

void parse_value(std::string_view name, std::string_view text, std::string_view allowed, index_t& value) {
  tessera::require(parses_whole(text, value), name, quoted(text), "a whole number, " + std::string(allowed),
                   "pass it as " + std::string(name) + "=NUMBER");
}

template <std::floating_point Number>
void parse_real(std::string_view name, std::string_view text, std::string_view allowed, Number& value) {
  tessera::require(parses_whole(text, value) && std::isfinite(value), name, quoted(text),
                   "a number, " + std::string(allowed),
                   "pass it as " + std::string(name) + "=NUMBER, with a point for decimals");
}

void parse_value(std::string_view name, std::string_view text, std::string_view allowed, float& value) {
  parse_real(name, text, allowed, value);
}

void parse_value(std::string_view name, std::string_view text, std::string_view allowed, double& value) {
  parse_real(name, text, allowed, value);
}

void parse_value(std::string_view name, std::string_view text, std::string_view allowed, tessera::split_factor& value) {
  if (text == "adaptive") {
    value = {};
    return;
  }
  double factor = 0;
  tessera::require(parses_whole(text, factor) && std::isfinite(factor), name, quoted(text), allowed,
                   "pass adaptive for the published formula");
  value = tessera::split_factor(factor);
}

std::string value_text(index_t value) { return std::to_string(value); }

std::string value_text(float value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value, std::chars_format::general).ptr};
}

std::string value_text(tessera::split_factor value) {
  if (value.adaptive) return "adaptive";
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value.fixed, std::chars_format::general).ptr};
}

element_type parse_element(std::string_view text) {
  require_one_of("dtype", text, {"fp32", "fp16", "bf16"});
  return text == "fp32" ? element_type::fp32 : text == "fp16" ? element_type::fp16 : element_type::bf16;
}

setting parse_setting(std::string_view text) {
  const std::size_t equals = text.find('=');
  tessera::require(equals != std::string_view::npos && equals > 0, "--set", quoted(text), "name=value",
                   "write for example --set window=16; `tessera list` shows the parameters of every method");
  return {std::string(trimmed(text.substr(0, equals))), std::string(trimmed(text.substr(equals + 1)))};
}

std::vector<setting> parse_settings(const std::vector<std::string>& texts) {
  std::vector<setting> all;
  for (const std::string& text : texts) {
    all.push_back(parse_setting(text));
    const auto same = [&](const setting& other) { return other.name == all.back().name; };
    tessera::require(std::count_if(all.begin(), all.end(), same) == 1, "--set", quoted(text), "every parameter once",
                     "take out one of the two " + engine::printable(all.back().name, 80));
  }
  return all;
}

std::vector<std::string> parse_list(std::string_view name, std::string_view text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string part(trimmed(text.substr(begin, end - begin)));
    tessera::require(!part.empty(), name, quoted(text), "one or more entries, separated by commas",
                     "take out the empty entry");
    tessera::require(std::find(parts.begin(), parts.end(), part) == parts.end(), name, quoted(text), "every entry once",
                     "take out the second " + engine::printable(part, 80));
    parts.push_back(part);
    begin = end + 1;
  }
  return parts;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view blanks = " \t\r\n\f\v";
  const std::size_t first = text.find_first_not_of(blanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(blanks) - first + 1);
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : ", ") + part;
  return all;
}

std::string nearest(std::string_view text, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, text.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(text, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

void fail_unknown_parameter(std::string_view given, std::string_view method, const std::vector<parameter_info>& known) {
  std::vector<std::string> names;
  for (const parameter_info& parameter : known) names.push_back(parameter.name);
  const std::string guess = nearest(given, names);
  tessera::fail("parameter", quoted(given),
                names.empty() ? "none: " + std::string(method) + " has no parameters but its budget"
                              : "a parameter of " + std::string(method) + ": " + joined(names),
                guess.empty() ? "see `tessera list`" : "did you mean " + guess + "?");
}

void require_one_of(std::string_view name, std::string_view text, const std::vector<std::string>& allowed) {
  if (std::find(allowed.begin(), allowed.end(), text) != allowed.end()) return;
  const std::string guess = nearest(text, allowed);
  if (allowed.empty()) tessera::fail(name, quoted(text), "none: there is nothing to choose from", "leave it out");
  tessera::fail(name, quoted(text), (allowed.size() > 1 ? "one of " : "") + joined(allowed),
                guess.empty() ? "pass one of these" : "did you mean " + guess + "?");
}

}  // namespace tool
