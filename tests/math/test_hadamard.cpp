#include <tessera/math/hadamard.hpp>

#include <bit>
#include <random>
#include <vector>

#include "catch.hpp"

TEST_CASE("a row times a Hadamard matrix, against the matrix in double") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int dim : {1, 2, 16, 64, 80, 96, 128, 192, 256, 512, 576}) {
    CAPTURE(dim);
    const int part = dim & -dim;
    std::vector<float> given(static_cast<std::size_t>(dim));
    for (float& x : given) x = normal(random);
    std::vector<float> row = given;
    tessera::hadamard(row.data(), dim);
    double before = 0, after = 0;
    for (int i = 0; i < dim; ++i) {
      double expected = 0;  // entry [i, j] is 1 or -1 by the bits that i and j share
      for (int j = i / part * part; j < i / part * part + part; ++j) {
        const bool negative = std::popcount(unsigned(i % part) & unsigned(j % part)) % 2 == 1;
        expected += (negative ? -1.0 : 1.0) * double(given[std::size_t(j)]);
      }
      CHECK(std::abs(double(row[std::size_t(i)]) - expected / std::sqrt(double(part))) <= 1e-5);
      before += double(given[std::size_t(i)]) * double(given[std::size_t(i)]);
      after += double(row[std::size_t(i)]) * double(row[std::size_t(i)]);
    }
    CHECK(std::abs(before - after) <= 1e-5 * before);
    tessera::hadamard(row.data(), dim);
    for (int i = 0; i < dim; ++i) CHECK(std::abs(row[std::size_t(i)] - given[std::size_t(i)]) <= 1e-5f);
  }
}
