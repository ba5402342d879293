#include "catch.hpp"

#include <tessera/selector/whole_blocks.hpp>

#include "laws/policies.hpp"

using namespace tessera;

namespace {

std::vector<index_t> taken(const std::vector<float>& scores, const std::vector<index_t>& sizes, index_t keep) {
  std::vector<index_t> out(scores.size() + 1, -7);
  top_k_scratch scratch;
  out.resize(std::size_t(
      whole_blocks{}.choose_blocks(scores.data(), sizes.data(), index_t(scores.size()), keep, out.data(), scratch)));
  return out;
}

using list = std::vector<index_t>;

}  // namespace

TEST_CASE("the first and the last block count, and the best of the others follow, by hand") {
  const std::vector<float> scores{0, 5, 1, 7, 2, -3};
  const list eights(6, 8);
  CHECK(taken(scores, eights, 16) == list{0, 5});
  CHECK(taken(scores, eights, 17) == list{0, 3, 5});  // rounded up to whole blocks
  CHECK(taken(scores, eights, 24) == list{0, 3, 5});
  CHECK(taken(scores, eights, 32) == list{0, 1, 3, 5});
  CHECK(taken(scores, eights, 48) == list{0, 1, 2, 3, 4, 5});
  CHECK(taken(scores, eights, 1000) == list{0, 1, 2, 3, 4, 5});
  // Blocks of several sizes: tokens count. 4 + 4 of the ends, then 16, then 8.
  CHECK(taken(scores, {4, 8, 8, 16, 8, 4}, 24) == list{0, 3, 5});
  CHECK(taken(scores, {4, 8, 8, 16, 8, 4}, 25) == list{0, 1, 3, 5});
  CHECK(taken({1}, {8}, 16) == list{0});
  CHECK(taken({1, 2}, {8, 8}, 16) == list{0, 1});
  CHECK(taken({}, {}, 16).empty());
}

TEST_CASE("ties go to the lower block and NaN last") {
  CHECK(taken({0, 2, 2, 2, 0}, list(5, 8), 32) == list{0, 1, 2, 4});
  CHECK(taken({0, support::not_a_number, -9, -8, 0}, list(5, 8), 32) == list{0, 2, 3, 4});
}

TEST_CASE("slots: whole blocks ascend, the tail stands behind them and does not count") {
  const whole_blocks fours{4};
  const std::vector<float> scores{0, 0, 0, 0, 1, 1, 9, 1, 5, 5, 5, 5, 0, 0, 0, 0, 7};
  CHECK(support::chosen(fours, scores, 1, 9) == list{0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16});
  support::rng random(404);
  for (index_t i = 0; i < support::scaled(4'000); ++i) {
    const whole_blocks policy{random.between(1, 9)};
    const index_t n = random.between(0, 80), tail = random.between(0, n), keep = random.between(1, 90);
    const auto row = support::tied_scores(random, n, random.pick({1, 3, 30}));
    const auto slots = support::chosen(policy, row, tail, keep);
    const index_t packed = n - tail, blocks = ceil_div(packed, policy.block);
    // Whole blocks, the first and the last among them, ascending, and the whole tail.
    std::vector<bool> has(std::size_t(n), false);
    for (std::size_t s = 0; s < slots.size(); ++s) {
      REQUIRE((slots[s] >= 0 && slots[s] < n && (s == 0 || slots[s] > slots[s - 1])));
      has[std::size_t(slots[s])] = true;
    }
    for (index_t slot = 0; slot < n; ++slot) {
      const index_t block = slot / policy.block;
      if (slot >= packed || block == 0 || block == blocks - 1) REQUIRE(has[std::size_t(slot)]);
      if (slot < packed) REQUIRE(has[std::size_t(slot)] == has[std::size_t(block * policy.block)]);
    }
    const index_t held = index_t(slots.size()) - tail;
    REQUIRE(held >= std::min(keep, packed));
    REQUIRE(held < std::max(keep, 2 * policy.block) + policy.block);
  }
}

TEST_CASE("a budget below two blocks is refused") {
  CHECK_THROWS_WITH(whole_blocks{8}.check_budget("budget", 15), contains("budget is 15; expected at least two blocks"));
  CHECK_NOTHROW(whole_blocks{8}.check_budget("budget", 16));
}
