#include "catch.hpp"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <tessera/core/encoding.hpp>
#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>
#include <tessera/core/views.hpp>

#include "support/random.hpp"

using namespace tessera;

// Rows hold elements: numbers of other types, and integers that hold the bits of elements, are none.
// tests/compile_fail/layout holds what rows of others say.
template <class T>
concept makes_rows = row_element<std::remove_const_t<T>>;
static_assert(makes_rows<float> && makes_rows<const fp16> && makes_rows<const bf16> && makes_rows<const fp8>);
static_assert(!makes_rows<const std::uint16_t> && !makes_rows<std::int8_t> && !makes_rows<const std::uint8_t> &&
              !makes_rows<const double> && !makes_rows<const int> && !makes_rows<const long double>);

TEST_CASE("bits that an engine keeps in integers are seen as elements") {
  std::uint16_t bits[] = {0x3f80, 0xc000, 0x3c00};
  CHECK(float(as_elements<bf16>(bits)[0]) == 1.0f);
  CHECK(float(as_elements<bf16>(bits)[1]) == -2.0f);
  CHECK(float(as_elements<fp16>(bits)[2]) == 1.0f);
  const std::uint8_t small[] = {0x38};
  CHECK(float(*nhd_rows(as_elements<fp8>(small), 1, 1, 1).row(0, 0, 0)) == 1.0f);
  as_elements<bf16>(bits)[0] = bf16(3.0f);
  CHECK(bits[0] == bf16(3.0f).bits);
}

namespace {

/// The value of a 16-bit float from its definition: sign, exponent field, mantissa field.
double value_of(unsigned bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, most = (1 << exponent_bits) - 1;
  const int exponent = int(bits >> mantissa_bits) & most;
  const double mantissa = double(bits & ((1u << mantissa_bits) - 1)) / double(1u << mantissa_bits);
  const double sign = bits & 0x8000u ? -1 : 1;
  if (exponent == most) return mantissa == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias);
  return sign * std::ldexp(1 + mantissa, exponent - bias);
}

/// All patterns widen to their value and come back; between any two neighbours, rounding goes to the nearest, ties to
/// the even pattern.
template <class T>
unsigned wrong_patterns(int exponent_bits, int mantissa_bits) {
  unsigned wrong = 0;
  const unsigned top = ((1u << exponent_bits) - 1) << mantissa_bits;  // infinity
  for (unsigned pattern = 0; pattern < 0x10000u; ++pattern) {
    T stored;
    stored.bits = std::uint16_t(pattern);
    const double value = value_of(pattern, exponent_bits, mantissa_bits);
    const float wide = stored;
    if (std::isnan(value)) {
      wrong += !std::isnan(wide) || !std::isnan(float(T(wide)));
      continue;
    }
    wrong += double(wide) != value || std::signbit(wide) != std::signbit(value) || T(wide).bits != pattern;
    const unsigned magnitude = pattern & 0x7fffu, sign = pattern & 0x8000u;
    if (magnitude >= top) continue;
    // The neighbour away from zero; past the largest finite value stands what the next exponent would give.
    const double next = magnitude + 1 == top ? std::copysign(std::ldexp(1.0, 1 << (exponent_bits - 1)), value)
                                             : value_of(pattern + 1, exponent_bits, mantissa_bits);
    const double middle = (value + next) / 2;
    if (double(float(middle)) != middle) continue;  // bf16 subnormals end where fp32 does
    const unsigned even = magnitude % 2 == 0 ? magnitude : magnitude + 1;
    wrong += T(float(middle)).bits != (sign | even);
    wrong += T(std::nextafterf(float(middle), 0.0f)).bits != (sign | magnitude);
    wrong +=
        T(std::nextafterf(float(middle), std::copysign(HUGE_VALF, float(middle)))).bits != (sign | (magnitude + 1));
  }
  return wrong;
}

}  // namespace

TEST_CASE("every fp16 pattern widens to its value and rounds back to nearest even") {
  CHECK(wrong_patterns<fp16>(5, 10) == 0);
}

TEST_CASE("every bf16 pattern widens to its value and rounds back to nearest even") {
  CHECK(wrong_patterns<bf16>(8, 7) == 0);
}

TEST_CASE("16-bit floats turn what is too large into infinity and keep NaN, signs and zeros") {
  CHECK(fp16(65519.0f).bits == 0x7bff);
  CHECK(fp16(65520.0f).bits == 0x7c00);
  CHECK(fp16(-1e30f).bits == 0xfc00);
  CHECK(fp16(infinity).bits == 0x7c00);
  CHECK(fp16(-0.0f).bits == 0x8000);
  CHECK(fp16(0x1p-24f).bits == 1);
  CHECK(fp16(0x1p-25f).bits == 0);
  CHECK(fp16(FLT_MIN / 4).bits == 0);
  CHECK(bf16(FLT_MAX).bits == 0x7f80);
  CHECK(bf16(-infinity).bits == 0xff80);
  CHECK(bf16(-0.0f).bits == 0x8000);
  for (const std::uint32_t word : {0x7f800001u, 0xffc00000u, 0x7fffffffu, 0xff80ffffu}) {
    CHECK(std::isnan(float(fp16(std::bit_cast<float>(word)))));
    CHECK(std::isnan(float(bf16(std::bit_cast<float>(word)))));
  }
}

#if defined(__FLT16_MAX__) && !defined(__clang__)
TEST_CASE("fp16 rounds as the compiler's own half does") {
  support::rng random(1);
  index_t wrong = 0;
  for (index_t i = 0; i < support::scaled(2'000'000); ++i) {
    const auto word = std::uint32_t(random.between(0, 0xffff)) << 16 | std::uint32_t(random.between(0, 0xffff));
    const float x = std::bit_cast<float>(word);
    if (std::isnan(x)) continue;
    const _Float16 half = static_cast<_Float16>(x);
    std::uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    wrong += fp16(x).bits != bits;
  }
  CHECK(wrong == 0);
}
#endif

TEST_CASE("an error names the parameter, what was given, what is allowed and the cure") {
  REQUIRE_NOTHROW(require(true, "window", 4, "at least 1", "raise it"));
  REQUIRE_THROWS_AS(require(false, "window", -3, "at least 1", "raise it"), error);
  REQUIRE_THROWS_WITH(require(false, "window", -3, "at least 1", "raise it"),
                      "window is -3; expected at least 1; raise it");
}

TEST_CASE("fp8 is the nearest e4m3, ties to even") {
  // The oracle: all values by their definition, the nearest one by distance in double.
  std::vector<double> values;  // by bits 0 to 126
  for (int bits = 0; bits < 127; ++bits) {
    const int exponent = bits >> 3, mantissa = bits & 7;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  }
  const auto nearest = [&](double x) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < values.size(); ++i) {
      const double now = std::abs(values[i] - x), before = std::abs(values[best] - x);
      if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return int(best);
  };
  std::mt19937 random(8);
  for (int bits = 0; bits < 127; ++bits) {
    tessera::fp8 stored;
    stored.bits = std::uint8_t(bits);
    REQUIRE(double(float(stored)) == values[std::size_t(bits)]);
    REQUIRE(tessera::fp8(float(stored)).bits == bits);
    REQUIRE(tessera::fp8(-float(stored)).bits == (bits | 0x80));
    if (bits == 0) continue;
    const float middle = float((values[std::size_t(bits)] + values[std::size_t(bits) - 1]) / 2);
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      REQUIRE(int(tessera::fp8(x).bits) == nearest(x));
    }
  }
  for (int i = 0; i < 2000; ++i) {
    const float x = std::ldexp(1.0f + float(random() % 8192) / 8192, int(random() % 22) - 13);
    REQUIRE(int(tessera::fp8(x).bits) == nearest(x));
  }
  CHECK(tessera::fp8(463.9f).bits == 0x7e);
  CHECK(tessera::fp8(1e30f).bits == 0x7e);
  CHECK(tessera::fp8(tessera::infinity).bits == 0x7f);
  CHECK(float(tessera::fp8(std::nanf(""))) != float(tessera::fp8(std::nanf(""))));
}

TEST_CASE("a row in fp8 is within a sixteenth of its elements, whatever its size") {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  for (const float size : {1e-20f, 1e-3f, 1.0f, 3e4f, 1e30f}) {
    std::vector<float> row(64);
    for (float& x : row) x = normal(random) * size;
    std::vector<tessera::fp8> stored(row.size());
    const float scale = tessera::encode_row<tessera::fp8_elements<float>>(row.data(), 64, stored.data(), 1);
    float largest = 0;
    for (const float x : row) largest = std::max(largest, std::abs(x));
    for (std::size_t d = 0; d < row.size(); ++d) {
      const float error = std::abs(float(stored[d]) * scale - row[d]);
      REQUIRE(error <= std::max(std::abs(row[d]) / 16, largest * std::ldexp(1.0f, -10) / 448) * 1.0001f);
    }
  }
  const float zeros[4] = {};
  tessera::fp8 stored[4];
  CHECK(tessera::encode_row<tessera::fp8_elements<float>>(zeros, 4, stored, 1) == 1.0f);
  CHECK(float(stored[3]) == 0.0f);
}
