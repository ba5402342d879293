// What a first user does: include, link, call.
#include <tessera/tessera.hpp>

#include <cstdio>
#include <string_view>

int main() {
  try {
    tessera::require(false, "budget", 0, "at least 1", "pass how many tokens to keep");
  } catch (const tessera::error& problem) {
    std::printf("tessera %d.%d.%d says: %s\n", TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH,
                problem.what());
    return std::string_view(problem.what()).starts_with("budget is 0") ? 0 : 1;
  }
  return 1;
}
