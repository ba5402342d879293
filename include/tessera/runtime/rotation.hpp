// The basis of a segment, computed on the host: the rotation that concentrates the rows' energy in few channels, and
// the order of these channels.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "../core/error.hpp"
#include "../core/host/host_vector.hpp"
#include "../core/stored/packed_row.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Eigenvalues, ascending, and eigenvectors, one per row, of a symmetric matrix [dim, dim].
///
/// The body is in runtime/eigen.hpp. Only methods that rotate rows include that header, so that no other code compiles
/// Eigen. nvcc skips the body. Link a CUDA source whose CPU cache rotates rows with a C++ source that has `template
/// void tessera::find_eigenvectors<double>(const double*, tessera::index_t, double*, double*);`.
template <class Real>
void find_eigenvectors(const Real* matrix, index_t dim, Real* values, Real* vectors);

/// Whether runtime/eigen.hpp is included.
template <class Real>
inline constexpr bool eigenvectors_included = false;

/// The sum of x x^T over rows, [dim, dim]. `load(i, to)` writes row i of `count` as fp32.
template <class Load>
host_vector<double> second_moment(index_t count, index_t dim, const Load& load) {
  host_vector<double> moment(static_cast<std::size_t>(dim * dim), 0.0);
  host_vector<float> row(static_cast<std::size_t>(dim));
  for (index_t i = 0; i < count; ++i) {
    load(i, row.data());
    for (index_t a = 0; a < dim; ++a) {
      double* to = moment.data() + offset_t(a) * dim;
      const double x = row[std::size_t(a)];
      for (index_t b = 0; b < dim; ++b) to[b] += x * double(row[std::size_t(b)]);
    }
  }
  return moment;
}

/// rotation [channels, dim] = the eigenvectors of the second moment [dim, dim] with the largest eigenvalues, the
/// largest first. The sign of each is such that its largest component (the first, if several are equal) is positive.
/// Thus the same rows always give the same rotation.
/// Errors   a second moment with NaN or infinity: tessera::error.
/// solve(matrix, dim, values, vectors) does what `find_eigenvectors` does.
template <class Real, class Solve>
void find_rotation(const host_vector<Real>& moment, index_t dim, index_t channels, const std::string& of,
                   float* rotation, const Solve& solve) {
  for (index_t i = 0; i < dim * dim; ++i) {
    const Real x = moment[std::size_t(i)];
    if (x - x == 0) continue;
    fail("the second moment of " + of + " at channels " + std::to_string(i / dim) + " and " + std::to_string(i % dim),
         x, "a finite number", "keep NaN and infinity out of keys and values, or scale them");
  }
  host_vector<Real> values(static_cast<std::size_t>(dim)), vectors(static_cast<std::size_t>(dim * dim));
  solve(moment.data(), dim, values.data(), vectors.data());
  for (index_t c = 0; c < channels; ++c) {
    const Real* from = vectors.data() + offset_t(dim - 1 - c) * dim;
    index_t top = 0;
    for (index_t d = 1; d < dim; ++d) {
      if (std::abs(from[d]) > std::abs(from[top])) top = d;
    }
    const Real sign = from[top] < 0 ? -1 : 1;
    for (index_t d = 0; d < dim; ++d) rotation[offset_t(c) * dim + d] = float(sign * from[d]);
  }
}
/// The same by Eigen's solver.
template <class Real>
void find_rotation(const host_vector<Real>& moment, index_t dim, index_t channels, const std::string& of,
                   float* rotation) {
  static_assert(eigenvectors_included<Real>,
                "tessera: a recipe whose rows are rotated needs Eigen's solver; include tessera/runtime/eigen.hpp");
  find_rotation(moment, dim, channels, of, rotation, [](const Real* matrix, index_t n, Real* values, Real* vectors) {
    find_eigenvectors(matrix, n, values, vectors);
  });
}

/// In a segment's basis the channel of the c-th largest eigenvalue is row c * spread_step(channels) % channels. So
/// strong channels lie evenly over a packed row's bits, and kernels that walk these meet no long gap: on an H200 a
/// step over rows whose channels fall by exp(-c / 16) takes 101 us in place of 131.
constexpr index_t spread_step(index_t channels) {
  index_t step = (std::max)(index_t(1), index_t(offset_t(channels) * 618 / 1000));  // the golden section
  while (std::gcd(step, channels) != 1) ++step;
  return step;
}
/// Spreads the rows of a rotation, basis [channels, dim].
inline void spread_channels(float* basis, index_t channels, index_t dim) {
  const host_vector<float> by_strength(basis, basis + offset_t(channels) * dim);
  const offset_t step = spread_step(channels);
  for (index_t c = 0; c < channels; ++c)
    std::copy_n(by_strength.data() + offset_t(c) * dim, dim, basis + c * step % channels * dim);
}

namespace detail {

/// Matches `items`, whose number is even, into pairs: greedily, the largest `likeness(a, b)` first, ties to the lower
/// items.
template <class Likeness>
host_vector<std::pair<index_t, index_t>> greedy_pairs(index_t items, const Likeness& likeness) {
  struct candidate {
    double likeness;
    index_t a, b;
  };
  host_vector<candidate> all;
  for (index_t a = 0; a < items; ++a) {
    for (index_t b = a + 1; b < items; ++b) all.push_back({likeness(a, b), a, b});
  }
  std::stable_sort(all.begin(), all.end(),
                   [](const candidate& x, const candidate& y) { return x.likeness > y.likeness; });
  host_vector<bool> taken(std::size_t(items), false);
  host_vector<std::pair<index_t, index_t>> pairs;
  for (const candidate& one : all) {
    if (taken[std::size_t(one.a)] || taken[std::size_t(one.b)]) continue;
    taken[std::size_t(one.a)] = taken[std::size_t(one.b)] = true;
    pairs.emplace_back(one.a, one.b);
  }
  std::sort(pairs.begin(), pairs.end());  // by the lower channel of the pair
  return pairs;
}

}  // namespace detail

/// An order of `channels` channels in which the 2 or 4 neighbours of a group are often chosen together; the identity
/// for groups of 1. Channels are matched greedily into pairs, then pairs into groups of 4. Groups are sorted by their
/// lowest channel. together [channels, channels]: how many vectors chose both channels. `group` divides `channels`.
inline host_vector<index_t> group_channels(const host_vector<double>& together, index_t channels, index_t group) {
  host_vector<host_vector<index_t>> groups;
  for (index_t c = 0; c < channels; ++c) groups.push_back({c});
  while (index_t(groups.front().size()) < group) {
    const auto pairs = detail::greedy_pairs(index_t(groups.size()), [&](index_t a, index_t b) {
      double sum = 0;
      for (const index_t x : groups[std::size_t(a)]) {
        for (const index_t y : groups[std::size_t(b)]) sum += together[std::size_t(offset_t(x) * channels + y)];
      }
      return sum;
    });
    host_vector<host_vector<index_t>> joined;
    for (const auto& [a, b] : pairs) {
      joined.push_back(groups[std::size_t(a)]);
      joined.back().insert(joined.back().end(), groups[std::size_t(b)].begin(), groups[std::size_t(b)].end());
      std::sort(joined.back().begin(), joined.back().end());
    }
    groups = std::move(joined);
  }
  std::sort(groups.begin(), groups.end());
  host_vector<index_t> order;
  for (const auto& one : groups) order.insert(order.end(), one.begin(), one.end());
  return order;
}

/// Rows by which the order of channels is found, and losses are measured: every so many-th, at most 1,024.
constexpr index_t sample_step(index_t count) {
  constexpr index_t samples = 1024;
  return count > samples ? ceil_div(count, samples) : 1;
}

/// The order for groups of `format.group`, from the single channels that the selector `channels` chooses in up to 1,024
/// of `count` rotated rows. row(i) is one of these rows, [format.channels].
template <class Channels, class Row>
host_vector<index_t> order_of_channels(const Channels& channels, const packed_format& format, index_t count,
                                       const Row& row) {
  packed_format single = format;
  single.group = 1;
  const index_t n = format.channels, step = sample_step(count);
  host_vector<double> together(std::size_t(n) * std::size_t(n), 0.0);
  host_vector<std::uint8_t> bits(std::size_t(single.set_bytes()));
  for (index_t i = 0; i < count; i += step) {
    channels.choose(row(i), single, bits.data());
    for (index_t a = 0; a < n; ++a) {
      if (!has_bit(bits.data(), a)) continue;
      for (index_t b = 0; b < n; ++b) together[std::size_t(offset_t(a) * n + b)] += has_bit(bits.data(), b);
    }
  }
  return group_channels(together, n, format.group);
}

TESSERA_NAMESPACE_END
