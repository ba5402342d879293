#include "catch.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include <tessera/core/plan/whole_pages.hpp>

#include "support/random.hpp"

using namespace tessera;

namespace {

std::vector<index_t> whole_pages(index_t page, const std::vector<index_t>& tokens, const std::vector<index_t>& least,
                                 std::vector<index_t> counts) {
  count_whole_pages(index_t(counts.size()), page, {tokens.data(), 1, least.data(), 0}, counts.data());
  return counts;
}

/// The definition where no head is full and none must keep more than it has: whole pages, and one more for the heads of the
/// largest remainders.
std::vector<index_t> largest_remainders(index_t page, const std::vector<index_t>& counts) {
  std::vector<std::size_t> order(counts.size());
  std::iota(order.begin(), order.end(), std::size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return counts[a] % page > counts[b] % page; });
  index_t left = 0;
  std::vector<index_t> whole;
  for (const index_t count : counts) whole.push_back(count / page * page), left += count % page;
  for (std::size_t i = 0; i < std::size_t(left / page); ++i) whole[order[i]] += page;
  return whole;
}

}  // namespace

TEST_CASE("heads keep whole pages, and pages that are left over go to the largest remainders") {
  // 40 + 25 + 31 = 96: six pages of 16.
  CHECK(whole_pages(16, {90, 90, 90}, {0, 0, 0}, {40, 25, 31}) == std::vector<index_t>{32, 32, 32});
  // 100: six pages, and four tokens that nobody keeps. Equal remainders: the lower head.
  CHECK(whole_pages(16, {90, 90, 90, 90}, {0, 0, 0, 0}, {25, 25, 25, 25}) == std::vector<index_t>{32, 32, 16, 16});
  CHECK(whole_pages(16, {90, 90}, {0, 0}, {7, 8}) == std::vector<index_t>{0, 0});
  CHECK(whole_pages(16, {90, 90}, {8, 8}, {8, 40}) == std::vector<index_t>{16, 32});   // what a head must keep
  CHECK(whole_pages(16, {90, 90}, {8, 8}, {8, 8}) == std::vector<index_t>{16, 16});    // even where it is more
  CHECK(whole_pages(16, {20, 90}, {0, 0}, {20, 44}) == std::vector<index_t>{20, 32});  // everything stays everything
  CHECK(whole_pages(16, {20, 90}, {0, 0}, {18, 30}) == std::vector<index_t>{16, 32});
  CHECK(whole_pages(16, {20, 90}, {18, 0}, {19, 45}) == std::vector<index_t>{20, 32});
  CHECK(whole_pages(1, {20, 90}, {0, 0}, {19, 45}) == std::vector<index_t>{19, 45});
  CHECK(whole_pages(16, {0, 0}, {0, 0}, {0, 0}) == std::vector<index_t>{0, 0});
}

TEST_CASE("counts of whole pages are those of the definition, and no more in all than before") {
  support::rng random(131);
  for (index_t i = 0; i < support::scaled(20'000); ++i) {
    const index_t page = random.pick({1, 2, 7, 16, 32, 128});
    std::vector<index_t> tokens, least, counts;
    const bool roomy = random.chance(0.5);
    for (index_t h = random.between(1, 12); h > 0; --h) {
      counts.push_back(random.between(0, 300));
      tokens.push_back(roomy ? 1000 : counts.back() + random.pick({0, 0, 3, 50, 400}));
      least.push_back(roomy ? 0 : random.between(0, counts.back()));
    }
    const auto whole = whole_pages(page, tokens, least, counts);
    CAPTURE(i, page, tokens, least, counts, whole);
    if (roomy) REQUIRE(whole == largest_remainders(page, counts));
    offset_t before = 0, after = 0, forced = 0;
    for (std::size_t h = 0; h < counts.size(); ++h) {
      REQUIRE((whole[h] % page == 0 || whole[h] == tokens[h]));
      REQUIRE(whole[h] >= least[h]);
      REQUIRE(whole[h] <= tokens[h]);
      if (counts[h] == tokens[h]) REQUIRE(whole[h] == tokens[h]);
      before += counts[h], after += whole[h];
      forced += (least[h] + page - 1) / page * page;
    }
    REQUIRE(after <= before + forced);
    if (roomy) REQUIRE(after > before - page);
  }
}
