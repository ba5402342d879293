// The one exception of Tessera's host code, and the check that throws it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "config.hpp"

TESSERA_SHARED_NAMESPACE_BEGIN

/// Bad input from the caller. The message says what was given, what is allowed and the cure.
class error : public std::runtime_error {
 public:
  TESSERA_INLINE explicit error(const std::string& text) : std::runtime_error(text) {}
  TESSERA_INLINE explicit error(const char* text) : std::runtime_error(text) {}
};

TESSERA_SHARED_NAMESPACE_END

TESSERA_NAMESPACE_BEGIN

/// Throws `error` with "<name> is <got>; expected <allowed>; <cure>".
template <class Got>
[[noreturn]] void fail(std::string_view name, const Got& got, std::string_view allowed, std::string_view cure) {
  std::ostringstream text;
  text << name << " is " << got << "; expected " << allowed << "; " << cure;
  throw error(text.str());
}

/// Throws as `fail` does unless `holds`. It always makes its texts: code that every layer of a step runs for every
/// sequence compares by itself and calls `fail`.
template <class Got>
void require(bool holds, std::string_view name, const Got& got, std::string_view allowed, std::string_view cure) {
  if (!holds) fail(name, got, allowed, cure);
}

TESSERA_NAMESPACE_END
