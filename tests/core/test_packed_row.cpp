#include "catch.hpp"

#include <tessera/core/stored/packed_row.hpp>

#include "support/random.hpp"

using namespace tessera;

TEST_CASE("rows take what the paper's arithmetic says") {
  // r values, a bit for each group of what truncation leaves; of a head dim of 128 in bf16 at a quarter.
  const auto bytes = [](packed_element element, index_t channels, index_t group, index_t kept) {
    return packed_format{element, channels, group, kept, true}.row_bytes();
  };
  CHECK(bytes(packed_element::bf16, 128, 1, 32) == 80);
  CHECK(bytes(packed_element::bf16, 96, 1, 32) == 76);
  CHECK(bytes(packed_element::bf16, 96, 2, 32) == 70);
  CHECK(bytes(packed_element::bf16, 96, 4, 32) == 67);
  CHECK(bytes(packed_element::bf16, 96, 1, 16) == 44);
  CHECK(bytes(packed_element::bf16, 96, 1, 48) == 108);
  CHECK(bytes(packed_element::fp8, 96, 1, 32) == 32 + 12 + 4);
  CHECK(bytes(packed_element::int4, 96, 1, 32) == 16 + 12 + 4);
  CHECK(bytes(packed_element::single, 48, 1, 16) == 64 + 6);
  CHECK(packed_format{packed_element::fp16, 128, 1, 77, false}.row_bytes() == 154);
}

TEST_CASE("same is the cache's own type") {
  CHECK(resolved<fp32>(packed_element::same) == packed_element::single);
  CHECK(resolved<bf16>(packed_element::same) == packed_element::bf16);
  CHECK(resolved<fp16>(packed_element::same) == packed_element::fp16);
  CHECK(resolved<bf16>(packed_element::int4) == packed_element::int4);
}

TEST_CASE("a row is packed by hand: values in channel order, int4 in halves of bytes") {
  const float row[] = {0, -7, 3.5f, 0.4f, 1, 2, 0, 0};
  std::uint8_t bits[1] = {0};
  for (const int c : {1, 2, 3, 5}) set_bit(bits, c);
  CHECK(bits[0] == 0b101110);
  std::byte values[16] = {};
  const packed_format four{packed_element::int4, 8, 1, 4, true};
  CHECK(pack_row(four, row, bits, values) == 1);
  CHECK(values[0] == std::byte(0x49));  // -7 in the lower half, 3.5 rounded to 4 in the upper one
  CHECK(values[1] == std::byte(0x20));
  float back[8];
  unpack_row(four, bits, values, 1, back);
  const float expected[] = {0, -7, 4, 0, 0, 2, 0, 0};
  for (int c = 0; c < 8; ++c) CHECK(back[c] == expected[c]);
}

TEST_CASE("unpacking gives what was kept, rounded as its element is, and 0 for the rest") {
  support::rng random(402);
  for (index_t i = 0; i < support::scaled(4'000); ++i) {
    packed_format format{random.pick({packed_element::bf16, packed_element::fp16, packed_element::fp8,
                                      packed_element::int4, packed_element::single}),
                         0, random.pick({1, 2, 4}), 0, true};
    const index_t groups = random.between(1, 64);
    format.channels = groups * format.group;
    std::vector<std::uint8_t> bits(std::size_t(format.set_bytes()), 0);
    for (index_t g = 0; g < groups; ++g) {
      if (random.chance(0.4)) {
        set_bit(bits.data(), g);
        format.stored_channels += format.group;
      }
    }
    const auto row = support::normals(random, std::size_t(format.channels), 3),
               q = support::normals(random, row.size());
    std::vector<std::byte> values(std::size_t(format.value_bytes()) + 1, std::byte(0x5a));
    const float scale = pack_row(format, row.data(), bits.data(), values.data());
    REQUIRE(values.back() == std::byte(0x5a));
    std::vector<float> back(row.size(), 9.0f);
    unpack_row(format, bits.data(), values.data(), scale, back.data());
    double largest = 0, dot = 0, terms = 0;
    for (index_t c = 0; c < format.channels; ++c) {
      if (has_bit(bits.data(), c / format.group)) largest = std::max(largest, std::abs(double(row[std::size_t(c)])));
    }
    for (std::size_t c = 0; c < row.size(); ++c) {
      const bool kept = has_bit(bits.data(), index_t(c) / format.group);
      const double x = double(row[c]), off = std::abs(double(back[c]) - x);
      if (!kept) {
        REQUIRE(back[c] == 0);
      } else if (format.element == packed_element::single) {
        REQUIRE(back[c] == row[c]);
      } else if (format.element == packed_element::int4) {
        REQUIRE(off <= largest / 14 * 1.0001);
      } else if (format.element == packed_element::fp8) {
        REQUIRE(off <= std::abs(x) / 16 * 1.0001 + largest / 448 / 1024 * 1.0001);
      } else {
        REQUIRE(off <= std::abs(x) / (format.element == packed_element::bf16 ? 256 : 2048) * 1.0001 + 1e-7);
      }
      dot += double(q[c]) * double(back[c]);
      terms += std::abs(double(q[c]) * double(back[c]));
    }
    REQUIRE(std::abs(double(packed_dot(format, q.data(), bits.data(), values.data(), scale)) - dot) <= 1e-5 * terms);
  }
}
