#include "catch.hpp"

#include <numeric>

#include <tessera/core/error.hpp>
#include <tessera/prefill/covering_lines.hpp>
#include <tessera/prefill/lasting_lines.hpp>

#include "prefill/line_case.hpp"
#include "prefill/published_case.hpp"

using namespace tessera;
using support::sampled_rows;

namespace {

constexpr index_t forced_slashes = 64, forced_columns = 4;

line_set chosen(const covering_lines& policy, sampled_rows& seen) {
  line_cover cover;
  line_set lines;
  policy.choose(seen.view(), cover, lines);
  return lines;
}

bool ascends(const std::vector<index_t>& list) {
  return std::adjacent_find(list.begin(), list.end(), std::greater_equal<>{}) == list.end();
}

// What every choice of lines must be, however it was made.
void is_a_choice(const sampled_rows& seen, const line_set& lines, double alpha) {
  REQUIRE((ascends(lines.vertical) && ascends(lines.slash)));
  for (const index_t at : lines.vertical) REQUIRE(std::binary_search(seen.positions.begin(), seen.positions.end(), at));
  for (const index_t distance : lines.slash) REQUIRE((distance < seen.next && seen.slash_length(distance) > 0));
  REQUIRE(seen.covered(lines) >= alpha * seen.total() * (1 - 1e-12));
  REQUIRE((!lines.slash.empty() && lines.slash[0] == 0));
}

void has_the_forced_lines(const sampled_rows& seen, const line_set& lines) {
  for (index_t distance = 0; distance < std::min(forced_slashes, seen.next); ++distance) {
    REQUIRE(std::binary_search(lines.slash.begin(), lines.slash.end(), distance) == (seen.slash_length(distance) > 0));
  }
  for (const index_t at : seen.positions) {
    if (at < forced_columns) REQUIRE(std::binary_search(lines.vertical.begin(), lines.vertical.end(), at));
  }
}

}  // namespace

TEST_CASE("lines cover alpha of the sampled rows with little more length than a greedy in double needs") {
  support::rng random(301);
  line_cover cover;  // one for all: nothing of an earlier choice may be left
  double worst = 0;
  for (index_t i = 0; i < support::scaled(10'000); ++i) {
    sampled_rows seen = support::random_sampled_rows(random, 160);
    const covering_lines policy{.alpha = random.pick({0.05f, 0.5f, 0.9f, 0.955f, 0.99f, 0.9999f})};
    CAPTURE(i, seen.first, seen.next, seen.rows.size(), seen.positions.size(), policy.alpha);
    line_set lines;
    policy.choose(seen.view(), cover, lines);
    is_a_choice(seen, lines, policy.alpha);
    has_the_forced_lines(seen, lines);
    const auto needed = support::greedy_lines(seen, policy.alpha, forced_slashes, forced_columns);
    worst = std::max(worst, double(seen.length(lines)) / double(seen.length(needed)));
    REQUIRE(double(seen.length(lines)) <= 1.1 * double(seen.length(needed)));
    REQUIRE(chosen(policy, seen).vertical == lines.vertical);
  }
  CHECK(worst >= 1);
}

TEST_CASE("the published greedy covers alpha too, whatever its bounds leave out") {
  support::rng random(302);
  for (index_t i = 0; i < support::scaled(3'000); ++i) {
    sampled_rows seen = support::random_sampled_rows(random, 140);
    const covering_lines policy{.alpha = random.pick({0.5f, 0.955f, 0.995f}), .algorithm = line_search::paper};
    CAPTURE(i, seen.first, seen.next, policy.alpha);
    const line_set lines = chosen(policy, seen);
    is_a_choice(seen, lines, policy.alpha);
    has_the_forced_lines(seen, lines);
  }
}

TEST_CASE("the published greedy takes the lines of a case worked by hand") {
  // Two rows of a history of four, in sixteenths: columns carry 9, 11, 10 and 2, slashes 5, 15, 8 and 4. Lines have two
  // entries each but for column 3 and slash 3.
  const auto sixteenths = [](std::vector<double> all) {
    for (double& x : all) x /= 16;
    return all;
  };
  sampled_rows seen{2, 4, {2, 3}, {0, 1, 2, 3}, sixteenths({5, 8, 3, 0, 4, 3, 7, 2})};
  line_cover cover;
  line_set lines;
  // Slash 1 first: 15 / 2 against column 1's 11 / 2. Its largest entry, 8, is taken off columns: column 1 has (11 - 8) / (2 - 1),
  // slash 2 has 8 / 2. Both together are 23 of 32.
  cover.begin(seen.view());
  cover.cover_as_published(0.7);
  cover.write(lines);
  CHECK(lines.slash == std::vector<index_t>{1, 2});
  CHECK(lines.vertical.empty());
  // For 24: the largest entries of both, 8 and 5, are more than column 1 has; slash 0 has 5 / 2.
  cover.begin(seen.view());
  cover.cover_as_published(0.75);
  cover.write(lines);
  CHECK(lines.slash == std::vector<index_t>{0, 1, 2});
}

TEST_CASE("the published greedy takes what the paper's steps take one by one, ties too") {
  // Quarters and eighths: sums, products and quotients do not round, so nothing is left to chance.
  support::rng random(305);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    sampled_rows seen = support::random_sampled_rows(random, 120);
    for (double& weight : seen.weights) weight = weight == 0 ? 0 : random.between(0, 4) / 8.0;
    const float share = random.pick({1e-5f, 0.3f, 0.955f, 0.9999f, 1.0f});
    CAPTURE(i, seen.first, seen.next, share);
    line_cover cover;
    line_set lines;
    cover.begin(seen.view());
    cover.cover_as_published(double(share));
    cover.write(lines);
    const line_set expected = support::published_greedy(seen, double(share));
    REQUIRE(lines.slash == expected.slash);
    REQUIRE(lines.vertical == expected.vertical);
  }
}

TEST_CASE("the published greedy goes on where it was when it is shown its lists in pieces") {
  support::rng random(306);
  for (index_t i = 0; i < support::scaled(2'000); ++i) {
    std::vector<weighed_line> lists[2];
    for (auto& list : lists) {
      for (index_t left = random.between(0, 60); left > 0; --left) {
        const double weight = random.between(1, 40) / 8.0;
        list.push_back({weight, weight / random.between(1, 6), random.between(1, 50)});
      }
      std::sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.weight > b.weight; });
      list.resize(200, weighed_line{});
    }
    const double wanted = random.between(0, 400) / 2.0;
    published_walk whole{}, parts{};
    REQUIRE(whole.go_on(wanted, lists[0].data(), lists[1].data(), 100));
    const index_t most = random.between(1, 70);
    while (!parts.go_on(wanted, lists[0].data() + parts.slashes, lists[1].data() + parts.verticals, most)) {
    }
    REQUIRE(parts.slashes == whole.slashes);
    REQUIRE(parts.verticals == whole.verticals);
    REQUIRE(parts.sum_of_gains == whole.sum_of_gains);
  }
}

TEST_CASE("what judges the published greedy of other weights knows this one's, and sees a line too many or too few") {
  support::rng random(307);
  index_t certain = 0, count = support::scaled(1'000);
  for (index_t i = 0; i < count; ++i) {
    sampled_rows seen = support::random_sampled_rows(random, 100);
    const double share = random.pick({1e-5, 0.3, 0.955, 0.9999, 1.0});
    CAPTURE(i, seen.first, seen.next, share);
    sampled_rows others = seen;  // as another machine has them
    for (double& weight : others.weights) weight *= 1 + 4e-5 * random.uniform();
    line_cover cover;
    line_set lines;
    cover.begin(others.view());
    cover.cover_as_published(share);
    cover.write(lines);
    const support::published_within_rounding judge(seen, share);
    REQUIRE(judge.allows(lines, 0, 0));
    if (!judge.certain()) continue;
    ++certain;
    for (auto* list : {&lines.slash, &lines.vertical}) {
      if (list->empty()) continue;
      const index_t line = list->back();
      list->pop_back();
      REQUIRE_FALSE(judge.allows(lines, 0, 0));
      const index_t forced = line + 1;  // whoever forces it need not have chosen it
      REQUIRE(judge.allows(lines, list == &lines.slash ? forced : 0, list == &lines.slash ? 0 : forced));
      list->push_back(line);
    }
    const auto more = support::published_lines(seen);
    for (const auto& line : more.verticals) {
      if (std::binary_search(lines.vertical.begin(), lines.vertical.end(), line.line)) continue;
      line_set with = lines;
      with.vertical.insert(std::lower_bound(with.vertical.begin(), with.vertical.end(), line.line), line.line);
      REQUIRE_FALSE(judge.allows(with, 0, 0));
      break;
    }
  }
  CHECK(certain > count / 5);
}

TEST_CASE("alpha 1 takes everything, by either search") {
  support::rng random(303);
  for (const auto algorithm : {line_search::coverage, line_search::paper}) {
    sampled_rows seen = support::random_sampled_rows(random, 200);
    const line_set lines = chosen({.alpha = 1, .algorithm = algorithm}, seen);
    CHECK(lines.vertical == seen.positions);
    CHECK(lines.slash == std::vector<index_t>{0});
  }
}

TEST_CASE("rows are sampled evenly, the newest among them") {
  support::rng random(305);
  for (index_t i = 0; i < 1'000; ++i) {
    const covering_lines policy{.sampled_rows = random.pick({1, 3, 48, 4096})};
    const index_t first = random.between(0, 1000), fresh = random.between(1, 3000);
    host_vector<index_t> rows;
    policy.sample(first, first + fresh, rows);
    REQUIRE(index_t(rows.size()) == std::min(policy.sampled_rows, fresh));
    REQUIRE((rows.front() >= first && rows.back() == first + fresh - 1));
    index_t before = first - 1, least = fresh, most = 0;
    for (const index_t row : rows) {
      least = std::min(least, row - before);
      most = std::max(most, row - before);
      before = row;
    }
    REQUIRE((least >= 1 && most - least <= 1));
  }
  host_vector<index_t> far;  // positions whose products with the rows do not fit into 32 bits
  covering_lines{}.sample(0, max_tokens, far);
  CHECK((ascends(far) && far.back() == max_tokens - 1));
}

TEST_CASE("random rows ascend, are as many as asked for, and are the same for whoever asks") {
  support::rng random(304);
  std::vector<index_t> counts(100);
  for (index_t i = 0; i < 4'000; ++i) {
    const covering_lines policy{.sampled_rows = random.pick({1, 3, 48}), .seed = i, .sampling = row_sampling::random};
    const index_t first = random.between(0, 1000), fresh = random.between(1, 100);
    host_vector<index_t> rows, again;
    policy.sample(first, first + fresh, rows);
    policy.sample(first, first + fresh, again);
    REQUIRE(rows == again);
    REQUIRE(index_t(rows.size()) == std::min(policy.sampled_rows, fresh));
    REQUIRE(ascends(rows));
    REQUIRE((rows.front() >= first && rows.back() < first + fresh));
    again.clear();
    covering_lines{.sampled_rows = 48, .seed = i, .sampling = row_sampling::random}.sample(500, 600, again);
    for (const index_t row : again) ++counts[std::size_t(row - 500)];
  }
  // Every row as often as any other: 1,920 times of 4,000, give or take six deviations of 32.
  for (const index_t count : counts) CHECK(std::abs(count - 1920) < 192);
  host_vector<index_t> one, other;
  covering_lines{.sampling = row_sampling::random}.sample(0, 500, one);
  covering_lines{.seed = 1, .sampling = row_sampling::random}.sample(0, 500, other);
  CHECK(one != other);
}

TEST_CASE("parameters of lines out of range are refused") {
  CHECK_NOTHROW(lasting_lines{}.check());
  CHECK_THROWS_WITH(covering_lines{.alpha = 0}.check(), contains("alpha is 0; expected "));
  CHECK_THROWS_WITH(covering_lines{.alpha = 1.01f}.check(), contains("alpha is 1.01; expected "));
  CHECK_THROWS_WITH(covering_lines{.sampled_rows = 0}.check(), contains("sampled_rows is 0; expected 1"));
  CHECK_FALSE(lasting_lines{}.adds_to_reading());
}
