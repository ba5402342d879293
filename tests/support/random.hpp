// Random data for tests: the same on every machine, in amounts that an environment variable scales.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include <tessera/core/types.hpp>

namespace support {

using tessera::index_t;

/// `count` times TESSERA_TEST_SCALE (1 by default; sanitizers run with less), at least 1.
inline index_t scaled(index_t count) {
  const char* text = std::getenv("TESSERA_TEST_SCALE");
  return std::max<index_t>(1, index_t(std::lround(double(count) * (text ? std::atof(text) : 1.0))));
}

/// Added to the seed of the GPU tests' generator: TESSERA_TEST_SEED, 0 by default. Runs of different seeds add up.
inline unsigned more_seed() {
  const char* text = std::getenv("TESSERA_TEST_SEED");
  return text ? unsigned(std::atoi(text)) : 0;
}

/// Splits random calls over processes: `block` is this one's with TESSERA_RANDOM_PART="part/parts", always without.
inline bool is_mine(index_t block) {
  const char* text = std::getenv("TESSERA_RANDOM_PART");
  const char* slash = text ? std::strchr(text, '/') : nullptr;
  return !slash || block % std::max(1, std::atoi(slash + 1)) == std::atoi(text);
}

/// A seeded generator. The standard library's distributions differ between implementations; these do not.
class rng {
 public:
  explicit rng(std::uint64_t seed) : engine_(seed) {}

  index_t between(index_t least, index_t most) {
    return least + index_t(engine_() % (std::uint64_t(most - least) + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  double uniform() { return double(engine_() >> 11) * 0x1p-53; }
  /// One of 65,536 normal numbers: to compute each anew took half of the tests' time.
  float normal() { return normal_numbers()[engine_() >> 48]; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[between(0, index_t(choices.size()) - 1)];
  }

  /// What `normal` draws from.
  static const float* normal_numbers() {
    static const std::vector<float> numbers = [] {
      rng random(16);
      std::vector<float> drawn(1 << 16);
      for (float& value : drawn) {
        const double radius = std::sqrt(-2 * std::log(1 - random.uniform()));
        value = float(radius * std::cos(6.283185307179586 * random.uniform()));
      }
      return drawn;
    }();
    return numbers.data();
  }

 private:
  std::mt19937_64 engine_;
};

inline std::vector<float> normals(rng& random, std::size_t count, float deviation = 1) {
  std::vector<float> values(count);
  for (auto& value : values) value = deviation * random.normal();
  return values;
}

/// `rows` rows of `dim`, each one of `distinct` different ones: equal keys get exactly equal scores.
inline std::vector<float> repeated_rows(rng& random, index_t rows, index_t dim, index_t distinct, float deviation = 1) {
  const auto palette = normals(random, std::size_t(distinct * dim), deviation);
  std::vector<float> values;
  for (index_t r = 0; r < rows; ++r) {
    const auto from = palette.begin() + random.between(0, distinct - 1) * dim;
    values.insert(values.end(), from, from + dim);
  }
  return values;
}

/// Scores of which many are equal: multiples of 1/4, sums of which are exact.
inline std::vector<float> tied_scores(rng& random, index_t count, index_t levels) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (auto& value : values) value = float(random.between(0, levels - 1) - levels / 3) * 0.25f;
  return values;
}

}  // namespace support
