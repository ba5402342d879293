// What a test prints of a list of calls that fails: the shortest one that still does, for a reader to paste.
#pragma once

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "must.hpp"
#include "shrink.hpp"

namespace support {

/// Replays shorter and simpler lists and says what it found, in lines of text.
/// Replay   `replay(list)`: what goes wrong with new caches, if anything does. It passes over calls that are not possible.
/// Code     `as_code(call)`: a line.
template <class Call, class Replay, class Code, class Simpler = nothing_simpler>
std::string shortest_failure(const std::vector<Call>& calls, const failure& first, const Replay& replay,
                             const Code& as_code, const Simpler& simpler = {}, int max_tries = 2000) {
  std::ostringstream text;
  const auto print = [&](const std::vector<Call>& list) {
    for (const Call& call : list) text << "  " << as_code(call) << "\n";
  };
  const auto fails_alike = [&](const std::vector<Call>& list) {
    const std::optional<failure> found = replay(list);
    return found && found->rule == first.rule;
  };
  text << "broken: " << first.rule << "\n";
  if (!first.details.empty()) text << first.details << "\n";
  if (const auto found = replay({})) {  // as on a device whose context is lost
    text << "No call at all fails too (" << found->rule << ": " << found->details
         << "), so these cannot be replayed:\n";
    print(calls);
    return text.str();
  }
  if (!fails_alike(calls)) {
    text << "The same calls do not fail so when they are replayed:\n";
    print(calls);
    return text.str();
  }
  const shrunk_list<Call> shortest = shrink(calls, fails_alike, simpler, max_tries);
  const auto found = replay(shortest.calls);
  text << "The shortest list that fails, " << shortest.calls.size() << " of " << calls.size() << " calls, found in "
       << shortest.tries << " tries" << (shortest.is_done ? "" : ", all that are allowed") << ":\n";
  print(shortest.calls);
  if (found && found->details != first.details) text << "With these calls: " << found->details << "\n";
  return text.str();
}

}  // namespace support
