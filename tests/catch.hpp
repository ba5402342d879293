// Catch2, version 2 or 3: tests include this and nothing else of it.
#pragma once

#include <string>

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;  // version 2 puts it into the global namespace itself
#else
#include <catch2/catch.hpp>
#endif

/// The two versions name this matcher differently: REQUIRE_THROWS_WITH(call(), contains("budget")).
inline auto contains(const std::string& part) {
#if __has_include(<catch2/catch_all.hpp>)
  return Catch::Matchers::ContainsSubstring(part);
#else
  return Catch::Matchers::Contains(part);
#endif
}
