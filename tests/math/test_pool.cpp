#include "catch.hpp"

#include <limits>

#include <tessera/math/pool.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

using namespace tessera;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::vector<float> scores_with_specials(support::rng& random, index_t n) {
  auto scores = random.chance(0.5) ? support::tied_scores(random, n, 4) : support::normals(random, std::size_t(n));
  for (auto& score : scores) {
    if (random.chance(0.03)) score = random.pick({not_a_number, infinity, -infinity});
  }
  return scores;
}

std::vector<float> max_pooled(const std::vector<float>& in, index_t kernel, host_vector<float>& scratch) {
  std::vector<float> out(in.size(), 99);
  max_pool(in.data(), index_t(in.size()), kernel, out.data(), scratch);
  return out;
}

std::vector<float> averaged(const std::vector<float>& in, index_t kernel) {
  std::vector<float> out(in.size(), 99);
  average_pool(in.data(), index_t(in.size()), kernel, out.data());
  return out;
}

}  // namespace

TEST_CASE("max_pool equals its definition for every odd kernel to 63 and every length to 200") {
  support::rng random(21);
  host_vector<float> scratch;
  for (index_t kernel = 1; kernel <= 63; kernel += 2) {
    for (index_t n = 1; n <= 200; n += kernel % 8 == 7 ? 1 : random.between(1, 5)) {
      const auto in = scores_with_specials(random, n);
      REQUIRE(max_pooled(in, kernel, scratch) == support::oracle::max_pool(in, kernel));
    }
  }
}

TEST_CASE("average_pool equals its definition for every odd kernel to 63 and lengths to 200") {
  support::rng random(22);
  for (index_t kernel = 1; kernel <= 63; kernel += 2) {
    for (index_t n = 1; n <= 200; n += random.between(1, 5)) {
      const auto in = scores_with_specials(random, n);
      const auto out = averaged(in, kernel);
      const auto expected = support::oracle::average_pool(in, kernel);
      for (std::size_t i = 0; i < in.size(); ++i) REQUIRE(support::number_error(out[i], expected[i]) < 1e-6);
    }
  }
}

TEST_CASE("pools by hand: plateaus, attenuated ends, and NaN that stays with its own token") {
  host_vector<float> scratch;
  CHECK(max_pooled({1, 5, 2, 0, 0, 3}, 3, scratch) == std::vector<float>{5, 5, 5, 2, 3, 3});
  CHECK(averaged({3, 3, 3, 3}, 3) == std::vector<float>{2, 3, 3, 2});
  CHECK(max_pooled({1, not_a_number, 2}, 3, scratch) == std::vector<float>{1, -infinity, 2});
  CHECK(averaged({3, not_a_number, 6}, 3) == std::vector<float>{1, -infinity, 2});
  CHECK(averaged({3, infinity, 6}, 3) == std::vector<float>{1, -infinity, 2});
  CHECK(max_pooled({not_a_number}, 7, scratch) == std::vector<float>{-infinity});
  CHECK(max_pooled({}, 7, scratch).empty());
  CHECK(averaged({}, 7).empty());
}
