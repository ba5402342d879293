#include "catch.hpp"

#include <limits>

#include <tessera/math/top_k.hpp>

#include "support/oracle.hpp"
#include "support/random.hpp"

using namespace tessera;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::vector<index_t> best(const std::vector<float>& scores, index_t k) {
  top_k_scratch scratch;
  std::vector<index_t> out(scores.size() + 1, -7);
  const index_t count = top_k(scores.data(), index_t(scores.size()), k, out.data(), scratch);
  CHECK(out[std::size_t(count)] == -7);  // writes nothing behind its result
  out.resize(std::size_t(count));
  return out;
}

}  // namespace

TEST_CASE("top_k chooses what a stable sort chooses on rows full of ties and specials") {
  support::rng random(11);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t n = random.pick({random.between(1, 40), random.between(1, 40), random.between(41, 400)});
    auto scores = support::tied_scores(random, n, random.pick({1, 2, 5, 50}));
    for (auto& score : scores) {
      if (random.chance(0.05))
        score = random.pick({not_a_number, -not_a_number, infinity, -infinity, -0.0f, 1e-42f, -1e-42f});
    }
    const index_t k = random.between(-2, n + 2);
    REQUIRE(best(scores, k) == support::oracle::top_k(scores, k));
  }
}

TEST_CASE("top_k gives ties to the lower index, and NaN ranks as -infinity") {
  CHECK(best({1, 3, 3, 3, 2}, 2) == std::vector<index_t>{1, 2});
  CHECK(best({not_a_number, 1, not_a_number, -5}, 2) == std::vector<index_t>{1, 3});
  CHECK(best({not_a_number, -infinity, not_a_number}, 2) == std::vector<index_t>{0, 1});
  CHECK(best({-0.0f, 0.0f}, 1) == std::vector<index_t>{0});
}

TEST_CASE("top_k takes everything when k reaches n and nothing when k is not positive") {
  for (const index_t n : {0, 1, 31, 32, 33}) {
    const std::vector<float> scores(std::size_t(n), not_a_number);
    CHECK(best(scores, n).size() == std::size_t(n));
    CHECK(best(scores, n + 1).size() == std::size_t(n));
    CHECK(best(scores, 0).empty());
    CHECK(best(scores, -3).empty());
  }
}

TEST_CASE("ordered bits rise with the float that they come from, and a rank key gives its index back") {
  const std::vector<float> ascending{-infinity, -std::numeric_limits<float>::max(), -1, -1e-42f, 0, 1e-42f, 1e-3f, 1,
                                     infinity};
  for (std::size_t i = 1; i < ascending.size(); ++i) CHECK(ordered_bits(ascending[i - 1]) < ordered_bits(ascending[i]));
  CHECK(ordered_bits(-0.0f) == ordered_bits(0.0f));
  CHECK(ordered_bits(not_a_number) == ordered_bits(-infinity));
  for (const index_t index : {0, 1, 77, 2147483647}) CHECK(rank_index(rank_key(-1.5f, index)) == index);
  CHECK(rank_key(1, 4) > rank_key(1, 5));
  CHECK(rank_key(1, 5) > rank_key(0.5f, 0));
}
