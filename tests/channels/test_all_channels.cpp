#include "catch.hpp"

#include <tessera/channels/all_channels.hpp>

using namespace tessera;

TEST_CASE("every channel stays") {
  for (const int dim : {1, 8, 9, 256}) {
    const packed_format format{packed_element::single, dim, 1, all_channels{}.stored_channels(dim), false};
    std::vector<std::uint8_t> bits(std::size_t(format.set_bytes()), 0xff);
    all_channels{}.choose_for_head(nullptr, nullptr, format, bits.data());
    for (index_t c = 0; c < format.set_bytes() * 8; ++c) CHECK(has_bit(bits.data(), c) == (c < dim));
    CHECK(format.row_bytes() == 4 * dim);
  }
}
