#include "catch.hpp"

#include <cstring>
#include <numeric>

#include <tessera/core/error.hpp>
#include <tessera/prefill/dense_prefill.hpp>
#include <tessera/prefill/sinks_and_band.hpp>
#include <tessera/prefill/vertical_slash.hpp>

#include "prefill/line_case.hpp"

using namespace tessera;
using support::sampled_rows;

namespace {

template <line_pattern Pattern>
line_set chosen(const Pattern& policy, sampled_rows& seen) {
  line_cover cover;
  line_set lines;
  policy.choose(seen.view(), cover, lines);
  return lines;
}

std::vector<index_t> range(index_t from, index_t to) {
  std::vector<index_t> all(std::size_t(to - from));
  std::iota(all.begin(), all.end(), from);
  return all;
}

}  // namespace

TEST_CASE("dense_prefill chooses no lines") {
  CHECK_FALSE(dense_prefill::chooses_lines);
  CHECK_FALSE(line_pattern<dense_prefill>);
  CHECK(dense_rows_of(dense_prefill{}) == 0);
}

TEST_CASE("sinks_and_band takes the first positions and the nearest diagonals, as far as there are any") {
  sampled_rows seen{60, 100, {}, range(0, 100), {}};
  const line_set lines = chosen(sinks_and_band{.init = 5, .local = 30}, seen);
  CHECK(lines.vertical == range(0, 5));
  CHECK(lines.slash == range(0, 30));
  const line_set all = chosen(sinks_and_band{}, seen);
  CHECK(all.vertical == range(0, 100));
  CHECK(all.slash == range(0, 100));
  // Of an evicted history only what is left: positions 0, 1 and the chunk's, whose rows see nothing between.
  std::vector<index_t> left{0, 1};
  for (const index_t at : range(90, 100)) left.push_back(at);
  sampled_rows evicted{90, 100, {}, left, {}};
  const line_set few = chosen(sinks_and_band{.init = 5, .local = 95}, evicted);
  CHECK(few.vertical == std::vector<index_t>{0, 1});
  std::vector<index_t> distances = range(0, 10);
  for (const index_t distance : range(89, 95)) distances.push_back(distance);
  CHECK(few.slash == distances);
  CHECK(dense_rows_of(sinks_and_band{.dense_rows = 7}) == 7);
  CHECK_THROWS_WITH(sinks_and_band{.local = 0}.check(), contains("local is 0; expected 1"));
  CHECK_THROWS_WITH(sinks_and_band{.init = -1}.check(), contains("init is -1; expected 0"));
  CHECK_THROWS_WITH(sinks_and_band{.dense_rows = -1}.check(), contains("dense_rows is -1; expected 0"));
}

TEST_CASE("vertical_slash looks at the last 64 rows of a chunk") {
  host_vector<index_t> rows;
  vertical_slash{}.sample(0, 100, rows);
  CHECK(rows == range(36, 100));
  rows.clear();
  vertical_slash{}.sample(95, 100, rows);
  CHECK(rows == range(95, 100));
}

TEST_CASE("vertical_slash takes so many lines by weight, its forced ones first") {
  support::rng random(311);
  for (index_t i = 0; i < support::scaled(500); ++i) {
    sampled_rows seen = support::random_sampled_rows(random, 300);
    const vertical_slash policy{.vertical = random.between(0, 320), .slash = random.between(0, 320)};
    CAPTURE(i, seen.first, seen.next, policy.vertical, policy.slash);
    const line_set lines = chosen(policy, seen);
    // In double, by stable sorts of whole lists.
    const auto best = [](std::vector<std::pair<double, index_t>> all, index_t count) {
      std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
      all.resize(std::min(all.size(), std::size_t(count)));
      std::vector<std::pair<double, index_t>> kept(all);
      return kept;
    };
    std::vector<std::pair<double, index_t>> columns, diagonals;
    for (std::size_t slot = 0; slot < seen.positions.size(); ++slot) {
      double sum = seen.positions[slot] < 30 ? 1e9 : 0;
      for (std::size_t r = 0; r < seen.rows.size(); ++r) sum += seen.weights[seen.at(r, slot)];
      columns.emplace_back(sum, seen.positions[slot]);
    }
    for (index_t distance = 0; distance < seen.next; ++distance) {
      if (seen.slash_length(distance) == 0) continue;
      double sum = distance < 100 ? 1e9 : 0;
      for (std::size_t r = 0; r < seen.rows.size(); ++r) {
        for (std::size_t slot = 0; slot < seen.positions.size(); ++slot) {
          if (seen.rows[r] - seen.positions[slot] == distance) sum += seen.weights[seen.at(r, slot)];
        }
      }
      diagonals.emplace_back(sum, distance);
    }
    const auto agrees = [](const std::vector<index_t>& got, const auto& all, const auto& expected) {
      REQUIRE(got.size() == expected.size());
      double mass = 0, wanted = 0;  // where sums tie to rounding, another line of the same weight will do
      for (const auto& [sum, line] : all) mass += std::binary_search(got.begin(), got.end(), line) ? sum : 0;
      for (const auto& [sum, line] : expected) wanted += sum;
      REQUIRE(mass == Approx(wanted).epsilon(1e-7));
    };
    agrees(lines.vertical, columns, best(columns, std::max(30, policy.vertical)));
    agrees(lines.slash, diagonals, best(diagonals, std::max(50, policy.slash)));
  }
  CHECK_THROWS_WITH((vertical_slash{.vertical = -1}.check()), contains("vertical is -1; expected 0"));
  CHECK_THROWS_WITH((vertical_slash{.slash = -1}.check()), contains("slash is -1; expected 0"));
}
