#include "catch.hpp"

#include <tessera/runtime/eigen.hpp>
#include <tessera/runtime/jacobi.hpp>

#include "support/random.hpp"

using namespace tessera;

namespace {

std::vector<float> rotation_of(const host_vector<double>& moment, index_t dim, index_t channels) {
  std::vector<float> result(std::size_t(channels * dim), 9.0f);
  find_rotation(moment, dim, channels, "keys", result.data());
  return result;
}

/// The second moment of rows whose channels have falling strength in a random basis.
host_vector<double> random_moment(support::rng& random, index_t dim, index_t rows) {
  const auto mix = support::normals(random, std::size_t(dim * dim));
  std::vector<double> moment(std::size_t(dim * dim), 0.0), row(static_cast<std::size_t>(dim));
  for (index_t r = 0; r < rows; ++r) {
    std::fill(row.begin(), row.end(), 0.0);
    for (index_t c = 0; c < dim; ++c) {
      const double strength = double(random.normal()) / double(c + 1);
      for (index_t d = 0; d < dim; ++d) row[std::size_t(d)] += strength * double(mix[std::size_t(c * dim + d)]);
    }
    for (index_t a = 0; a < dim; ++a) {
      for (index_t b = 0; b < dim; ++b) moment[std::size_t(a * dim + b)] += row[std::size_t(a)] * row[std::size_t(b)];
    }
  }
  return moment;
}

}  // namespace

TEST_CASE("the rotation of a second moment, by hand") {
  // (3, 4) twice and (4, -3) once: eigenvalues 50 and 25.
  const auto rotation = rotation_of({2 * 9 + 16, 2 * 12 - 12, 2 * 12 - 12, 2 * 16 + 9}, 2, 2);
  const float expected[] = {0.6f, 0.8f, 0.8f, -0.6f};
  for (int i = 0; i < 4; ++i) CHECK(rotation[std::size_t(i)] == Approx(expected[i]).margin(1e-6));
  // Of equal components the first is positive; nothing at all still is a rotation.
  CHECK(rotation_of({1, -1, -1, 1}, 2, 1)[0] == Approx(std::sqrt(0.5)));
  const auto none = rotation_of({0, 0, 0, 0}, 2, 2);
  CHECK(none[0] * none[0] + none[1] * none[1] == Approx(1));
  CHECK(none[0] * none[2] + none[1] * none[3] == Approx(0).margin(1e-7));
}

TEST_CASE("rows of a rotation are orthonormal, diagonalise the moment and fall in strength") {
  support::rng random(403);
  for (const index_t dim : {64, 96, 128, 256}) {
    for (const index_t rows : {index_t(32), 3 * dim}) {  // fewer rows than channels too
      CAPTURE(dim, rows);
      const auto moment = random_moment(random, dim, rows);
      const auto r = rotation_of(moment, dim, dim);
      const auto product = [&](index_t a, index_t b, bool weighted) {
        double sum = 0;
        for (index_t i = 0; i < dim; ++i) {
          double inner = 0;
          if (weighted) {
            for (index_t j = 0; j < dim; ++j)
              inner += moment[std::size_t(i * dim + j)] * double(r[std::size_t(b * dim + j)]);
          } else {
            inner = double(r[std::size_t(b * dim + i)]);
          }
          sum += double(r[std::size_t(a * dim + i)]) * inner;
        }
        return sum;
      };
      const double strongest = product(0, 0, true);
      double before = strongest;
      for (index_t a = 0; a < dim; a += 7) {
        REQUIRE(product(a, a, false) == Approx(1).margin(1e-5));
        const double own = product(a, a, true);
        REQUIRE(own <= before + 1e-5 * strongest);
        before = own;
        for (index_t b = 0; b < a; b += 5) {
          REQUIRE(std::abs(product(a, b, false)) < 1e-5);
          REQUIRE(std::abs(product(a, b, true)) < 1e-5 * strongest);
        }
      }
      // Truncation keeps the strongest: the first rows of the same rotation.
      const auto half = rotation_of(moment, dim, dim / 2);
      REQUIRE(std::equal(half.begin(), half.end(), r.begin()));
      REQUIRE(rotation_of(moment, dim, dim) == r);
    }
  }
}

TEST_CASE("channels of a segment's basis are spread: any of the strongest lie evenly over a row") {
  for (const index_t channels : {1, 2, 3, 12, 24, 48, 60, 64, 96, 128, 192, 256}) {
    CAPTURE(channels);
    std::vector<float> basis;
    for (index_t c = 0; c < channels; ++c) basis.insert(basis.end(), {float(c), float(-c)});
    spread_channels(basis.data(), channels, 2);
    std::vector<index_t> rows(std::size_t(channels), no_index);
    for (index_t row = 0; row < channels; ++row) {
      const auto rank = std::size_t(basis[std::size_t(row * 2)]);
      REQUIRE(basis[std::size_t(row * 2 + 1)] == -float(rank));
      rows[rank] = row;
    }
    for (index_t strong = 1; strong <= channels; strong *= 2) {  // the longest gap between them, around the end too
      std::vector<index_t> some(rows.begin(), rows.begin() + strong);
      std::sort(some.begin(), some.end());
      index_t gap = some.front() + channels - some.back();
      for (std::size_t i = 1; i < some.size(); ++i) gap = std::max(gap, some[i] - some[i - 1]);
      CHECK(gap <= 1 + 3 * channels / strong);
    }
  }
}

TEST_CASE("a second moment with NaN or infinity is refused by its place") {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    std::vector<double> moment(16, 1.0);
    moment[6] = bad;
    CHECK_THROWS_WITH(rotation_of(moment, 4, 4), contains("second moment of keys at channels 1 and 2"));
  }
}

TEST_CASE("channels that are chosen together become neighbours, by hand") {
  // Of six channels 0 and 3, 1 and 5, 2 and 4 are chosen together.
  std::vector<double> together(36, 0.0);
  const auto link = [&](index_t a, index_t b, double times) {
    together[std::size_t(a * 6 + b)] = together[std::size_t(b * 6 + a)] = times;
  };
  link(0, 3, 9);
  link(1, 5, 8);
  link(2, 4, 7);
  link(0, 1, 6);
  CHECK(group_channels(together, 6, 2) == std::vector<index_t>{0, 3, 1, 5, 2, 4});
  CHECK(group_channels(together, 6, 1) == std::vector<index_t>{0, 1, 2, 3, 4, 5});
  // Nothing is known: neighbours stay neighbours.
  CHECK(group_channels(std::vector<double>(64, 0.0), 8, 4) == std::vector<index_t>{0, 1, 2, 3, 4, 5, 6, 7});
  // Pairs of pairs: {0, 2} and {1, 3} go with {6, 7} and {4, 5}.
  std::vector<double> eight(64, 0.0);
  const auto join = [&](index_t a, index_t b, double times) {
    eight[std::size_t(a * 8 + b)] = eight[std::size_t(b * 8 + a)] = times;
  };
  join(0, 2, 9);
  join(1, 3, 9);
  join(4, 5, 9);
  join(6, 7, 9);
  join(0, 6, 4);
  join(1, 4, 3);
  CHECK(group_channels(eight, 8, 4) == std::vector<index_t>{0, 2, 6, 7, 1, 3, 4, 5});
}

TEST_CASE("Jacobi's eigenvectors make the rotation that Eigen's make") {
  support::rng random(405);
  for (const index_t dim : {1, 2, 7, 64, 128}) {
    for (const index_t rows : {index_t(1), dim / 2 + 1, 3 * dim}) {
      CAPTURE(dim, rows);
      const auto moment = random_moment(random, dim, rows);
      const index_t found = std::min(rows, dim);  // the other directions are any
      const auto right = rotation_of(moment, dim, found);
      std::vector<double> values(static_cast<std::size_t>(dim)), vectors(moment.size());
      find_eigenvectors_by_jacobi(moment.data(), dim, values.data(), vectors.data());
      CHECK(std::is_sorted(values.begin(), values.end()));
      std::vector<float> rotation(right.size());
      find_rotation(moment, dim, found, "keys", rotation.data(),
                    [](const double* matrix, index_t n, double* of, double* to) {
                      find_eigenvectors_by_jacobi(matrix, n, of, to);
                    });
      double worst = 0, uneven = 0;
      for (index_t c = 0; c < found; ++c) {
        if (values[std::size_t(dim - 1 - c)] < 1e-6 * values.back()) break;  // too weak to have one direction
        for (index_t d = 0; d < dim; ++d) {
          const std::size_t at = std::size_t(c * dim + d);
          worst = std::max(worst, std::abs(double(rotation[at]) - double(right[at])));
        }
      }
      for (index_t a = 0; a < dim; ++a) {
        for (index_t b = 0; b <= a; ++b) {
          double sum = 0;
          for (index_t d = 0; d < dim; ++d)
            sum += vectors[std::size_t(a * dim + d)] * vectors[std::size_t(b * dim + d)];
          uneven = std::max(uneven, std::abs(sum - (a == b ? 1.0 : 0.0)));
        }
      }
      CHECK(worst < 1e-4);
      CHECK(uneven < 1e-12);
    }
  }
}
