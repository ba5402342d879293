#include "catch.hpp"

#include <cmath>

#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/int8_rows.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

TEST_CASE("int8 rows obey the laws of layouts, in runs and in pages") {
  support::obeys_the_laws_of_layouts<stored<int8_rows<fp32, 64>, runs>>(231);
  support::obeys_the_laws_of_layouts<stored<int8_rows<bf16, 80, 64>, fixed_pages<1>>>(232);
}

TEST_CASE("int8 rows take a byte an element and two scales, whatever the elements were") {
  CHECK(stored<int8_rows<bf16, 128>, runs>::token_bytes() == 264);
  CHECK(stored<int8_rows<fp32, 64>, runs>::token_bytes() == 136);
  CHECK(stored<int8_rows<fp16, 192, 128>, fixed_pages<16>>::token_bytes() == 328);
  CHECK(double(stored<int8_rows<bf16, 128>, runs>::token_bytes()) / dense<bf16, 128>::token_bytes() <= 0.52);
}

TEST_CASE("an element of an int8 row is off by half a step at most, and a row that is not finite is NaN altogether") {
  support::rng random(233);
  for (index_t i = 0; i < support::scaled(200); ++i) {
    const float size = random.pick({1e-6f, 1.0f, 1e6f, 1e30f});
    std::vector<float> row = support::normals(random, 96, size);
    if (i % 8 == 0) row.assign(96, random.pick({0.0f, -0.0f}));
    if (i % 8 == 1) row[std::size_t(random.between(0, 95))] = -3e38f;
    const auto spoiled = std::size_t(random.between(0, 95));
    if (i % 4 == 3) row[spoiled] = random.pick({infinity, -infinity, std::nanf("")});
    std::vector<int8> held(96);
    const float scale = encode_row<int8_elements<bf16>>(row.data(), 96, held.data(), 1);
    float largest = 0;
    for (const float x : row) largest = std::max(largest, std::abs(x));
    for (std::size_t d = 0; d < row.size(); ++d) {
      const double read = double(float(held[d])) * double(scale);
      if (i % 4 == 3) {
        REQUIRE(std::isnan(read));
      } else {
        REQUIRE(std::abs(read - double(row[d])) <= double(largest) / 254 * (1 + 1e-5));
        REQUIRE((held[d].bits >= -127 && held[d].bits <= 127));
      }
    }
  }
}
