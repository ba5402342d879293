#include "catch.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include <tessera/channels/top_groups.hpp>

#include "support/random.hpp"

using namespace tessera;

namespace {

std::string chosen(const std::vector<float>& row, index_t group, index_t kept) {
  const packed_format format{packed_element::single, index_t(row.size()), group, kept, true};
  std::vector<std::uint8_t> bits(std::size_t(format.set_bytes()), 0xff);
  top_groups{}.choose(row.data(), format, bits.data());
  std::string text;
  for (index_t g = 0; g < format.groups(); ++g) text += has_bit(bits.data(), g) ? '1' : '0';
  return text;
}

}  // namespace

TEST_CASE("the groups with most energy stay, whatever their sign, by hand") {
  const std::vector<float> row{1, -5, 0, 3, 2, 2, -4, 0};
  CHECK(chosen(row, 1, 1) == "01000000");
  CHECK(chosen(row, 1, 3) == "01010010");
  CHECK(chosen(row, 2, 2) == "1000");  // 26, 9, 8, 16
  CHECK(chosen(row, 2, 4) == "1001");
  CHECK(chosen(row, 4, 4) == "10");  // 35, 24
  CHECK(chosen(row, 1, 8) == "11111111");
  CHECK(chosen(row, 1, 0) == "00000000");
}

TEST_CASE("ties go to the lower group, and what is no number goes last") {
  CHECK(chosen({2, -2, 2, 2}, 1, 2) == "1100");
  CHECK(chosen({0, 0, 0, 0}, 1, 1) == "1000");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(chosen({nan, 0, 1, nan}, 1, 2) == "0110");
  CHECK(chosen({nan, nan, nan, nan}, 1, 2) == "1100");
}

TEST_CASE("groups are the best of a stable sort in double") {
  support::rng random(401);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t group = random.pick({1, 2, 4}), groups = random.between(1, 256 / group);
    const index_t wanted = random.between(0, groups);
    auto row = random.chance(0.3) ? support::tied_scores(random, groups * group, 5)
                                  : support::normals(random, std::size_t(groups * group));
    std::vector<double> energy(std::size_t(groups), 0.0);
    for (index_t c = 0; c < groups * group; ++c)
      energy[std::size_t(c / group)] += double(row[std::size_t(c)]) * double(row[std::size_t(c)]);
    std::vector<index_t> order(static_cast<std::size_t>(groups));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](index_t a, index_t b) { return energy[std::size_t(a)] > energy[std::size_t(b)]; });
    const std::string got = chosen(row, group, wanted * group);
    REQUIRE(std::count(got.begin(), got.end(), '1') == wanted);
    for (index_t rank = 0; rank < groups; ++rank) {
      const index_t g = order[std::size_t(rank)];
      const double cut = wanted > 0 && wanted < groups
                             ? (rank < wanted ? energy[std::size_t(order[std::size_t(wanted)])]
                                              : energy[std::size_t(order[std::size_t(wanted - 1)])])
                             : -1;
      const bool close =
          std::abs(energy[std::size_t(g)] - cut) < 1e-6 * energy[std::size_t(g)] && cut != energy[std::size_t(g)];
      if (!close) REQUIRE((got[std::size_t(g)] == '1') == (rank < wanted));
    }
  }
}

TEST_CASE("a share of the head dim is rounded to whole elements") {
  const auto kept = [](float channels, int dim) { return top_groups{channels, 1}.stored_channels(dim); };
  for (const int dim : {64, 96, 128, 256}) {
    CHECK(kept(0.25f, dim) == dim / 4);
    CHECK(kept(0.125f, dim) == dim / 8);
    CHECK(kept(0.375f, dim) == 3 * dim / 8);
    CHECK(kept(1, dim) == dim);
  }
  CHECK(kept(0.01f, 64) == 1);
  CHECK(kept(0.001f, 64) == 0);
  CHECK_THROWS_WITH((top_groups{0.5f, 3}.check()), contains("group is 3"));
  CHECK_THROWS_WITH((top_groups{1.5f, 1}.check()), contains("channels is 1.5"));
}
