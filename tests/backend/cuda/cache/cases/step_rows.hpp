// Random rows of a prompt's chunk or of a step, on the host and on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "backend/cuda/device.hpp"
#include "support/random.hpp"
#include "tessera/backend/cuda/cache.cuh"

namespace gpu_test {

/// Rows as they are, or such that an encoding's scale is a power of two: decoded to 16 bits they lose nothing then.
enum class scales { any, even };

/// The largest magnitude of rows of this encoding, between 1 and 2; 0: whatever it is.
template <class Encoding>
float row_largest(scales kind) {
  if constexpr (Encoding::scaled) {
    int exponent = 0;
    if (kind == scales::even) return 2 * std::frexp(std::round(1 / Encoding::scale_of(1)), &exponent);
  }
  return 0;
}

template <class T>
std::vector<T> random_rows(std::size_t elements, int dim, float deviation, float largest = 0,
                           std::mt19937& engine = rng()) {
  std::vector<T> rows(elements);  // by a table: logarithms would take most of a conversation's time
  for (T& x : rows) x = T(deviation * support::rng::normal_numbers()[engine() >> 16]);
  for (std::size_t i = 0; largest > 0 && i < elements; ++i) {
    const float x = float(rows[i]);
    rows[i] = T(i % std::size_t(dim) == 0 ? std::copysign(largest, x) : std::clamp(x, -largest, largest));
  }
  return rows;
}

template <class T>
struct step_rows {
  std::vector<T> q, k, v;
  buffer<T> dq, dk, dv;
  index_t sequences, tokens, q_heads, kv_heads;
  int dim;
  step_rows(index_t batch, index_t n, const model_shape& shape, int d, float largest = 0, std::mt19937& engine = rng())
      : q(random_rows<T>(std::size_t(batch * n * shape.q_heads * d), d, 1.5f, 0, engine)),
        k(random_rows<T>(std::size_t(batch * n * shape.kv_heads * d), d, 1.5f, largest, engine)),
        v(random_rows<T>(std::size_t(batch * n * shape.kv_heads * d), d, 1, largest, engine)),
        dq(q),
        dk(k),
        dv(v),
        sequences(batch),
        tokens(n),
        q_heads(shape.q_heads),
        kv_heads(shape.kv_heads),
        dim(d) {}
  rows_view<const T> rows(const T* data, index_t heads, index_t skip = 0) const {
    rows_view<const T> all = nhd_rows<const T>(data, tokens, heads, dim, sequences);
    all.data += skip * all.token_stride;
    all.tokens -= skip;
    return all;
  }
};

/// Where the segments of so many new tokens end, for a method that wants to know.
template <class Method>
std::vector<std::uint8_t> random_boundaries(index_t tokens, std::mt19937& engine = rng()) {
  std::vector<std::uint8_t> ends;
  for (index_t t = 0; Method::needs_segments && t < tokens; ++t) ends.push_back(draw(0, 11, engine) == 0);
  return ends;
}

inline double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] != got[i]) return 1e9;
    difference += (double(got[i]) - expected[i]) * (double(got[i]) - expected[i]);
    size += double(expected[i]) * expected[i];
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

}  // namespace gpu_test
