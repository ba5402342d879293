#include "catch.hpp"

#include <tessera/channels/head_channels.hpp>

using namespace tessera;

namespace {

std::vector<index_t> chosen(const std::vector<double>& queries, const std::vector<double>& keys, index_t kept) {
  const packed_format format{packed_element::single, index_t(keys.size()), 1, kept, false};
  std::vector<std::uint8_t> bits(std::size_t(format.set_bytes()), 0xff);
  head_channels{}.choose_for_head(queries.empty() ? nullptr : queries.data(), keys.data(), format, bits.data());
  std::vector<index_t> result;
  for (index_t c = 0; c < format.channels; ++c) {
    if (has_bit(bits.data(), c)) result.push_back(c);
  }
  return result;
}

}  // namespace

TEST_CASE("a channel counts by the product of what queries and keys hold in it") {
  const std::vector<double> queries{4, 1, 0, 2, 9}, keys{1, 5, 100, 3, 0.1};  // 4, 5, 0, 6, 0.9
  CHECK(chosen(queries, keys, 1) == std::vector<index_t>{3});
  CHECK(chosen(queries, keys, 3) == std::vector<index_t>{0, 1, 3});
  CHECK(chosen(queries, keys, 5) == std::vector<index_t>{0, 1, 2, 3, 4});
  CHECK(chosen({}, keys, 2) == std::vector<index_t>{1, 2});  // keys alone
  CHECK(chosen({1, 1, 1}, {2, 2, 2}, 2) == std::vector<index_t>{0, 1});
  CHECK(chosen({}, {std::nan(""), 0, 1}, 2) == std::vector<index_t>{1, 2});
}

TEST_CASE("as many channels go as the published code drops: int(0.4 * dim)") {
  CHECK(head_channels{}.stored_channels(64) == 64 - 25);
  CHECK(head_channels{}.stored_channels(80) == 80 - 32);
  CHECK(head_channels{}.stored_channels(96) == 96 - 38);
  CHECK(head_channels{}.stored_channels(128) == 128 - 51);
  CHECK(head_channels{}.stored_channels(256) == 256 - 102);
  CHECK(head_channels{1.0f}.stored_channels(128) == 128);
  CHECK(head_channels{0.0f}.stored_channels(128) == 0);
}
