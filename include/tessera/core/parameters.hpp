// Run-time parameters of policies: each policy shows them to a visitor by name, with the values that they may have.
#pragma once

#include <sstream>
#include <string>

#include "config.hpp"
#include "error.hpp"
#include "host/host_vector.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// The values that a parameter may have, both ends included. Checks, messages and tests of a parameter use it.
template <class T>
struct value_range {
  T least, largest;

  constexpr bool holds(T value) const { return value >= least && value <= largest; }  // never for NaN

  std::string text() const {
    std::ostringstream both;
    both << least;
    if (largest != least) both << " to " << largest;
    return both.str();
  }

  void check(const char* name, T value, const std::string& cure) const {
    require(holds(value), name, value, text(), cure);
  }
};

/// A range of the type of its ends.
template <class T>
value_range(T, T) -> value_range<T>;  // for clang 16

/// The words of `one_word_of`, in order: "max or average" has two, "off, low or high" has three.
inline host_vector<std::string> words_of(const std::string& text) {
  host_vector<std::string> words{""};
  for (std::size_t at = 0; at < text.size();) {
    const bool comma = text.compare(at, 2, ", ") == 0, last = text.compare(at, 4, " or ") == 0;
    if (comma || last) {
      words.emplace_back();
      at += comma ? 2 : 4;
    } else {
      words.back() += text[at++];
    }
  }
  return words;
}

/// A parameter that is a word of an enumeration: each of its values is allowed.
struct one_word_of {
  const char* words;  ///< of each value, in the enumeration's order: "max or average"

  std::string text() const { return words; }
  template <class T>
  void check(const char*, const T&, const std::string&) const {}
};

/// The largest count of tokens. Its sum with a sequence's length fits index_t, its product with one fits offset_t.
inline constexpr index_t max_tokens = 1 << 24;

/// What a token budget per kv_head may be.
inline constexpr value_range<index_t> token_budgets{1, max_tokens};
inline constexpr value_range<index_t> estimating_budgets{16, max_tokens};  ///< where it pays for an estimate of keys

/// A visitor that looks at nothing: what the concepts try `parameters` with.
struct ignore_parameters {
  template <class T, class Allowed>
  void operator()(const char*, T&, const Allowed&, const char*) const {}
};

/// A policy that shows every run-time parameter: `static void parameters(self, visit)` calls
/// `visit(name, self.member, value_range{least, largest}, "what it means")` for each of them.
template <class P>
concept has_parameters = requires(P& policy) { P::parameters(policy, ignore_parameters{}); };

/// Throws tessera::error unless every parameter of a policy is in its allowed range.
template <has_parameters P>
void check_parameters(const P& policy) {
  P::parameters(policy, [](const char* name, const auto& value, const auto& allowed, const char* about) {
    allowed.check(name, value, std::string("it means: ") + about);
  });
}

TESSERA_NAMESPACE_END
