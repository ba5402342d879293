// Random numbers that are the same on every machine: the standard's distributions are not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <tessera/core/error.hpp>
#include <vector>

namespace tool {

class random_source {
 public:
  explicit random_source(std::uint64_t seed) : engine_(seed) {}

  /// A source for one item of a named series, independent of the others.
  random_source(std::uint64_t seed, std::string_view series, std::uint64_t item) : engine_(seed) {
    std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    for (const char letter : series) hash = (hash ^ std::uint8_t(letter)) * 0x100000001b3u;
    engine_.seed(engine_() ^ hash ^ (item * 0x9e3779b97f4a7c15u));
  }

  /// Uniform in [0, count), count >= 1.
  std::size_t below(std::size_t count) { return std::size_t(engine_() % count); }

  /// Uniform in [0, 1).
  double unit() { return double(engine_() >> 11) * 0x1p-53; }

  template <class T>
  void shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

  /// `count` different items in random order. Errors: there are fewer.
  template <class T>
  std::vector<T> sample(std::vector<T> items, std::size_t count) {
    tessera::require(count <= items.size(), "items to choose from", items.size(), "at least " + std::to_string(count),
                     "lengthen the list, or ask for fewer");
    for (std::size_t i = 0; i < count; ++i) std::swap(items[i], items[i + below(items.size() - i)]);
    items.resize(count);
    return items;
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tool
