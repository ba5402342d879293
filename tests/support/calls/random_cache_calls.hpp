// Calls of a cache in random order: what is wrong with one, and the shortest list of calls with which it is.
#pragma once

#include <iostream>

#include "call_code.hpp"
#include "drawn_calls.hpp"
#include "support/shrink/shortest_failure.hpp"

namespace support {

/// Makes so many random calls. Says what is wrong with one in a sentence, and prints the shortest list of calls with which it is;
/// empty: nothing is. Throws as the caches do that cannot be made.
inline std::string wrong_of_random_calls(rng& random, const called_caches& caches, index_t count,
                                         agreement* seen = nullptr) {
  random_cache_calls drawn(random, caches, seen);
  const auto found = failure_of([&] {
    for (index_t i = 0; i < count; ++i) drawn.call();
  });
  if (!found) return {};
  const auto replay = [&](const std::vector<cache_call>& calls) {
    return failure_of([&] {
      agreement unused;
      checked_calls replayed(caches, &unused);
      for (const cache_call& call : calls) replayed.make(call);
    });
  };
  const call_code code(caches.limits.on_device);
  std::cout << shortest_failure(drawn.made(), *found, replay, code, simpler_calls(caches.limits.on_device)) << "where\n"
            << code.beginning() << std::flush;
  return found->rule;
}

}  // namespace support
