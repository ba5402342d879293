#include "catch.hpp"

#include <cmath>

#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/int2_rows.hpp>
#include <tessera/layout/int4_rows.hpp>
#include <tessera/layout/int8_rows.hpp>

#include "laws/layouts.hpp"

using namespace tessera;

namespace {

/// Every element is the nearest of the group's levels, and levels are where the group's ends, in fp16, put them.
template <class Encoding>
void elements_are_nearest(std::uint64_t seed) {
  using group = typename Encoding::stored_type;
  support::rng random(seed);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    auto values = support::normals(random, group::elements, random.pick({1e-3f, 1.0f, 300.0f}));
    const float shift = random.pick({0.0f, 0.0f, 5.0f, -40.0f});
    for (float& x : values) x += shift;
    if (i % 7 == 0) values.assign(values.size(), values[0]);
    const group made = group::encode(values.data());
    double low = double(values[0]), high = low;
    for (const float x : values) low = std::min(low, double(x)), high = std::max(high, double(x));
    const double lowest = double(float(made.lowest)), step = double(float(made.step));
    REQUIRE(std::abs(lowest - low) <= std::abs(low) / 2048 + 1e-7);
    REQUIRE(std::abs(step - std::max(0.0, high - lowest) / group::largest) <= step / 2048 + 1e-7);
    float decoded[group::elements];
    made.decode(decoded);
    for (std::size_t d = 0; d < values.size(); ++d) {
      const double own = std::abs(double(made.element(int(d))) - double(values[d]));
      REQUIRE(decoded[d] == made.element(int(d)));
      for (int code = 0; code <= group::largest; ++code)
        REQUIRE(own <= std::abs(lowest + step * code - double(values[d])) + 1e-5 * std::abs(high - low) +
                           1e-6 * std::abs(low));
    }
  }
}

/// How far attention over encoded rows is from attention over the rows themselves, relative to its length: the mean over
/// queries, normal rows of 128 channels, in double.
template <class Encoding>
double error_of_attention(std::uint64_t seed) {
  constexpr int dim = 128, tokens = 512, queries = 16;
  support::rng random(seed);
  const auto k = support::normals(random, std::size_t(tokens * dim)), v = support::normals(random, k.size()),
             q = support::normals(random, std::size_t(queries * dim));
  const auto attend = [&](int row, const auto& key_of, const auto& value_of) {
    std::vector<double> out(dim, 0.0);
    double sum = 0;
    for (int t = 0; t < tokens; ++t) {
      const std::vector<float> key = key_of(t), value = value_of(t);
      double logit = 0;
      for (int d = 0; d < dim; ++d) logit += double(q[std::size_t(row * dim + d)]) * double(key[std::size_t(d)]);
      const double weight = std::exp(logit / std::sqrt(double(dim)));
      sum += weight;
      for (int d = 0; d < dim; ++d) out[std::size_t(d)] += weight * double(value[std::size_t(d)]);
    }
    for (double& x : out) x /= sum;
    return out;
  };
  const auto given = [](const std::vector<float>& rows) {
    return [&rows](int t) { return std::vector<float>(rows.begin() + t * dim, rows.begin() + (t + 1) * dim); };
  };
  const auto encoded = [](const std::vector<float>& rows) {
    return [&rows](int t) { return support::decoded_row<Encoding>(rows.data() + t * dim, dim); };
  };
  double total = 0;
  for (int row = 0; row < queries; ++row) {
    const auto full = attend(row, given(k), given(v)), low = attend(row, encoded(k), encoded(v));
    double away = 0, length = 0;
    for (std::size_t d = 0; d < full.size(); ++d) {
      away += (low[d] - full[d]) * (low[d] - full[d]);
      length += full[d] * full[d];
    }
    total += std::sqrt(away / length) / queries;
  }
  return total;
}

}  // namespace

TEST_CASE("attention over normal rows of few bits errs by 2 per cent in 8 bits, by 20 in 4") {
  const double in_8 = error_of_attention<int8_rows<fp32, 128>::encoding_type>(247),
               in_4 = error_of_attention<int4_rows<fp32, 128>::encoding_type>(247),
               in_2 = error_of_attention<int2_rows<fp32, 128>::encoding_type>(247);
  CAPTURE(in_8, in_4, in_2);
  CHECK(in_8 <= 0.02);
  CHECK(in_4 <= 0.2);
  CHECK(in_2 <= 1.0);
  CHECK((in_8 < in_4 && in_4 < in_2));
}

TEST_CASE("rows of 4 and 2 bits obey the laws of layouts, in runs and in pages") {
  support::obeys_the_laws_of_layouts<stored<int4_rows<fp32, 64>, runs>>(241);
  support::obeys_the_laws_of_layouts<stored<int4_rows<bf16, 80, 64>, fixed_pages<1>>>(242);
  support::obeys_the_laws_of_layouts<stored<int2_rows<fp32, 96>, fixed_pages<16>>>(243);
}

TEST_CASE("an element in few bits is the nearest level of its group") {
  elements_are_nearest<int4_rows<fp32, 128>::encoding_type>(244);
  elements_are_nearest<int4_rows<fp32, 80, 64>::encoding_type>(245);
  elements_are_nearest<int2_rows<fp32, 128>::encoding_type>(246);
}

TEST_CASE("rows of 4 and 2 bits take their bits and four bytes a group") {
  CHECK(stored<int4_rows<bf16, 128>, runs>::token_bytes() == 2 * 2 * (32 + 4));
  CHECK(stored<int2_rows<bf16, 128>, runs>::token_bytes() == 2 * 2 * (16 + 4));
  CHECK(stored<int4_rows<fp16, 80>, fixed_pages<16>>::token_bytes() == 2 * (40 + 4));
  CHECK(stored<int4_rows<fp16, 192, 128>, fixed_pages<16>>::token_bytes() == 5 * (32 + 4));
  const double whole = double(dense<bf16, 128>::token_bytes());
  CHECK(double(stored<int4_rows<bf16, 128>, runs>::token_bytes()) / whole <= 0.29);
  CHECK(double(stored<int2_rows<bf16, 128>, runs>::token_bytes()) / whole <= 0.17);
}
