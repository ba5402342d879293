// What tests say in place of REQUIRE where their calls are made again to find the shortest list that fails.
#pragma once

#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace support {

/// A rule that did not hold. REQUIRE would report it for every list that a shrinker tries.
class broken_rule : public std::exception {
 public:
  broken_rule(std::string rule, std::string details) : rule_(std::move(rule)), details_(std::move(details)) {}
  const char* what() const noexcept override { return rule_.c_str(); }
  const std::string& rule() const { return rule_; }
  const std::string& details() const { return details_; }

 private:
  std::string rule_, details_;
};

/// Throws broken_rule unless `holds`. `details` are written one after another, and only then.
template <class... Details>
void must(bool holds, const char* rule, const Details&... details) {
  if (holds) return;
  std::ostringstream text;
  static_cast<void>((text << ... << details));
  throw broken_rule(rule, text.str());
}

/// "{1, 2, 3}"
template <class List>
std::string listed(const List& list) {
  std::ostringstream text;
  const char* between = "";
  for (const auto& item : list) text << std::exchange(between, ", ") << item;
  return "{" + text.str() + "}";
}

/// What went wrong: lists of calls fail alike when they break the same rule.
struct failure {
  std::string rule, details;
};

/// A sentence without its numbers, which other calls may change.
inline std::string without_numbers(std::string sentence) {
  std::erase_if(sentence, [](char letter) { return letter >= '0' && letter <= '9'; });
  return sentence;
}

/// What goes wrong in `run`, if anything does.
template <class Run>
std::optional<failure> failure_of(const Run& run) {
  try {
    run();
    return std::nullopt;
  } catch (const broken_rule& broken) {
    return failure{broken.rule(), broken.details()};
  } catch (const std::exception& thrown) {
    return failure{"no call throws but to refuse its arguments: " + without_numbers(thrown.what()), thrown.what()};
  }
}

}  // namespace support
