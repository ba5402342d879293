// Parameter values and names as text: parsing with errors that teach, and printing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <tessera/budget/two_stage.hpp>
#include <tessera/core/error.hpp>
#include <tessera/core/parameters.hpp>
#include <tessera/core/types.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "method_cache.hpp"

namespace tool {

/// A whole number in [least, most]. Errors: anything else, naming what was given.
std::int64_t parse_count(std::string_view name, std::string_view text, std::int64_t least,
                         std::int64_t most = tessera::max_tokens);

/// Throws tessera::error unless `text` is one of `allowed`; suggests the nearest.
void require_one_of(std::string_view name, std::string_view text, const std::vector<std::string>& allowed);

/// Parses a parameter of any type that policies use; `allowed` says in words what it may be.
/// Errors: text of another type, or a number that the type does not hold.
void parse_value(std::string_view name, std::string_view text, std::string_view allowed, index_t& value);
void parse_value(std::string_view name, std::string_view text, std::string_view allowed, float& value);
void parse_value(std::string_view name, std::string_view text, std::string_view allowed, double& value);
void parse_value(std::string_view name, std::string_view text, std::string_view allowed, tessera::split_factor& value);

std::string value_text(index_t value);
std::string value_text(float value);
std::string value_text(tessera::split_factor value);

template <class Word>
requires std::is_enum_v<Word>
void parse_value(std::string_view name, std::string_view text, std::string_view allowed, Word& value) {
  const std::vector<std::string> words = tessera::words_of(std::string(allowed));
  require_one_of(name, text, words);
  value = Word(std::find(words.begin(), words.end(), text) - words.begin());
}

/// A value as `parse_value` takes it.
template <class Value>
std::string value_text(const Value& value, std::string_view allowed) {
  if constexpr (std::is_enum_v<Value>) {
    return tessera::words_of(std::string(allowed))[std::size_t(value)];
  } else {
    return value_text(value);
  }
}

/// fp32, fp16 or bf16. Errors: any other word.
element_type parse_element(std::string_view text);

/// "name=value". Errors: no equals sign, or nothing before it.
setting parse_setting(std::string_view text);

/// Several of them. Errors: as `parse_setting`; the same name twice.
std::vector<setting> parse_settings(const std::vector<std::string>& texts);

/// The parts between commas, without white space around them. Errors: no part, an empty one, or one given twice.
std::vector<std::string> parse_list(std::string_view name, std::string_view text);

/// `text` without white space at its ends.
std::string_view trimmed(std::string_view text);

/// "a, b, c"
std::string joined(const std::vector<std::string>& parts);

/// The candidate that `text` was probably meant to be, or an empty string.
std::string nearest(std::string_view text, const std::vector<std::string>& candidates);

[[noreturn]] void fail_unknown_parameter(std::string_view given, std::string_view method,
                                         const std::vector<parameter_info>& known);

/// Calls `use.template operator()<T, D>()` for a cache's head dim. Errors: an unsupported one.
template <class T, class Use>
auto with_head_dim(int head_dim, Use&& use) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    decltype(use.template operator()<T, head_dims[0]>()) made {};
    std::string allowed;
    const bool known = ((head_dim == head_dims[I] && (made = use.template operator()<T, head_dims[I]>(), true)) || ...);
    ((allowed += (I == 0 ? "" : ", ") + std::to_string(head_dims[I])), ...);
    tessera::require(known, "head_dim", head_dim, "one of " + allowed,
                     "pass a model or tensors of such heads, or build the tool for them (TESSERA_TOOL_HEAD_DIMS)");
    return made;
  }(std::make_index_sequence<std::size(head_dims)>{});
}

/// The same for a cache's element type and head dim.
template <class Use>
auto with_layout(element_type element, int head_dim, Use&& use) {
  switch (element) {
    case element_type::fp32:
      return with_head_dim<tessera::fp32>(head_dim, use);
    case element_type::fp16:
      return with_head_dim<tessera::fp16>(head_dim, use);
    default:
      return with_head_dim<tessera::bf16>(head_dim, use);
  }
}

}  // namespace tool
