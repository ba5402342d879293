// Delta debugging: a list of calls that fails becomes as short as it gets.
#pragma once

#include <chrono>
#include <cstddef>
#include <iostream>
#include <utility>
#include <vector>

namespace support {

/// What a shrinker has made of a list.
template <class Call>
struct shrunk_list {
  std::vector<Call> calls;
  int tries = 0;
  bool is_done = true;  ///< false: the tries were used up, and it might be shorter
};

/// Calls that have no simpler form: they are only left out.
struct nothing_simpler {
  template <class Call>
  std::vector<std::vector<Call>> operator()(const std::vector<Call>&, std::size_t) const {
    return {};
  }
};

/// Leaves calls out, halves of the list first and single calls last, and takes simpler ones, as long as the list fails.
template <class Call, class Fails, class Simpler>
class shrinker {
 public:
  using list = std::vector<Call>;

  shrinker(list calls, const Fails& fails, const Simpler& simpler, int max_tries)
      : calls_(std::move(calls)), began_with_(calls_.size()), fails_(fails), simpler_(simpler), max_tries_(max_tries) {}

  shrunk_list<Call> run() {
    do leave_out();
    while (simplify());
    return {std::move(calls_), tries_, tries_ < max_tries_};
  }

 private:
  /// Takes the candidate if it fails.
  bool accept(list candidate) {
    if (tries_ >= max_tries_) return false;
    ++tries_;
    say_progress();
    if (!fails_(std::as_const(candidate))) return false;
    calls_ = std::move(candidate);
    return true;
  }
  /// From the end, where calls are that no other one needs.
  void leave_out() {
    for (std::size_t part = calls_.size(); part > 0; part = part > 1 ? (part + 1) / 2 : 0) {
      bool shorter = true;
      while (shorter && (tries_ < max_tries_)) {
        shorter = false;
        for (std::size_t end = calls_.size(); end > 0;) {
          const std::size_t begin = end > part ? end - part : 0;
          list candidate(calls_.begin(), calls_.begin() + std::ptrdiff_t(begin));
          candidate.insert(candidate.end(), calls_.begin() + std::ptrdiff_t(end), calls_.end());
          shorter = accept(std::move(candidate)) || shorter;
          end = begin;
        }
        if (part > 1) break;  // once more only with single calls
      }
    }
  }
  bool simplify() {
    bool simplified = false;
    for (std::size_t index = 0; index < calls_.size(); ++index) {
      bool repeat = true;
      while (repeat && index < calls_.size()) {  // a simpler list may be shorter
        repeat = false;
        for (list& candidate : simpler_(std::as_const(calls_), index)) {
          if (!accept(std::move(candidate))) continue;
          repeat = simplified = true;
          break;
        }
      }
    }
    return simplified;
  }
  /// A line every few seconds; nothing else looks at the clock.
  void say_progress() {
    const auto now = std::chrono::steady_clock::now();
    if (now - said_ < std::chrono::seconds(5)) return;
    said_ = now;
    std::cerr << "shrinking: " << calls_.size() << " of " << began_with_ << " calls after " << tries_ << " tries\n";
  }

  list calls_;
  std::size_t began_with_;
  const Fails& fails_;
  const Simpler& simpler_;
  int max_tries_, tries_ = 0;
  std::chrono::steady_clock::time_point said_ = std::chrono::steady_clock::now();
};

/// The shortest list that still fails, as far as so many tries find it.
/// Calls    any that can be copied. `calls` fails; a call that another one has made possible is left out or passed over by `fails`.
/// Fails    `fails(list)`: whether a list fails, in the same way as `calls`. The same list must always give the same answer.
/// Simpler  `simpler(list, index)`: lists with a simpler call in place of `list[index]`, the simplest first; all must be simpler in an order
///          that has an end.
/// Cost     about `log2(n)` calls of `fails` for each call that stays, at most `max_tries`.
template <class Call, class Fails, class Simpler = nothing_simpler>
shrunk_list<Call> shrink(std::vector<Call> calls, const Fails& fails, const Simpler& simpler = {},
                         int max_tries = 2000) {
  return shrinker<Call, Fails, Simpler>(std::move(calls), fails, simpler, max_tries).run();
}

}  // namespace support
