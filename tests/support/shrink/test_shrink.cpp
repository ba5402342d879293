// The shrinker: known shortest lists, simpler calls, lists that cannot be replayed, and the end of tries.
#include "catch.hpp"

#include <algorithm>
#include <numeric>

#include "shortest_failure.hpp"
#include "support/random.hpp"

namespace {

using numbers = std::vector<int>;

numbers up_to(int count) {
  numbers all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
bool has(const numbers& list, int value) { return std::find(list.begin(), list.end(), value) != list.end(); }

}  // namespace

TEST_CASE("of a list that fails by some of its calls these remain, in their order") {
  support::rng random(9911);
  for (const int count : {1, 2, 31, 32, 33, 250}) {
    for (int i = 0; i < 20; ++i) {
      numbers needed;
      for (int n = random.between(1, std::min(count, 5)); n > 0; --n) needed.push_back(random.between(0, count - 1));
      std::sort(needed.begin(), needed.end());
      needed.erase(std::unique(needed.begin(), needed.end()), needed.end());
      const auto fails = [&](const numbers& list) {
        return std::all_of(needed.begin(), needed.end(), [&](int value) { return has(list, value); });
      };
      const auto found = support::shrink(up_to(count), fails);
      REQUIRE(found.calls == needed);
      REQUIRE(found.is_done);
    }
  }
}

TEST_CASE("calls that only make others possible go with them, in several rounds") {
  // Even numbers open what the next odd one closes; a close that nothing has opened is passed over. Three that are closed fail.
  const auto fails = [](const numbers& list) {
    int open = -1, closed = 0;
    for (const int value : list) {
      if (value % 2 == 0) open = value;
      closed += value % 2 == 1 && open == value - 1;
    }
    return closed >= 3;
  };
  const auto found = support::shrink(up_to(200), fails);
  REQUIRE(found.calls.size() == 6);
  REQUIRE(fails(found.calls));
  for (std::size_t i = 0; i < 6; i += 2) REQUIRE(found.calls[i + 1] == found.calls[i] + 1);
}

TEST_CASE("what fails without any call becomes the empty list") {
  const auto found = support::shrink(up_to(40), [](const numbers&) { return true; });
  CHECK(found.calls.empty());
  CHECK(found.tries == 1);
}

TEST_CASE("simpler calls are taken as long as the list fails") {
  const auto fails = [](const numbers& list) {
    return std::count_if(list.begin(), list.end(), [](int value) { return value >= 17; }) >= 2;
  };
  const auto simpler = [](const numbers& list, std::size_t index) {
    std::vector<numbers> lists;
    for (const int value : {0, list[index] / 2, list[index] - 1}) {
      if (value < 0 || value >= list[index]) continue;
      lists.push_back(list);
      lists.back()[index] = value;
    }
    return lists;
  };
  const auto found = support::shrink(up_to(300), fails, simpler);
  CHECK(found.calls == numbers{17, 17});
}

TEST_CASE("tries have an end, and the list that was found until then fails") {
  const auto fails = [](const numbers& list) { return has(list, 3) && has(list, 400) && has(list, 777); };
  for (const int tries : {0, 1, 10, 30}) {
    const auto found = support::shrink(up_to(1000), fails, {}, tries);
    CHECK_FALSE(found.is_done);
    CHECK(found.tries == tries);
    CHECK(fails(found.calls));
  }
}

TEST_CASE("the report names the rule, the shortest list and what was found with it") {
  const auto replay = [](const numbers& list) {
    return support::failure_of([&] {
      for (const int value : list) support::must(value != 5, "no call is 5", "it is ", value, " of ", list.size());
      support::must(list.size() != 2 || list[0] != 8, "another rule", "");
    });
  };
  const auto as_code = [](int value) { return "call(" + std::to_string(value) + ");"; };
  const numbers calls = up_to(10);
  const auto text = support::shortest_failure(calls, *replay(calls), replay, as_code);
  CHECK_THAT(text, contains("broken: no call is 5\nit is 5 of 10\n"));
  CHECK_THAT(text, contains("1 of 10 calls, found in "));
  CHECK_THAT(text, contains(":\n  call(5);\nWith these calls: it is 5 of 1\n"));
}

TEST_CASE("what cannot be replayed is printed whole") {
  const auto as_code = [](int value) { return std::to_string(value); };
  const support::failure first{"a rule", "details"};
  const auto never = [](const numbers&) { return std::optional<support::failure>(); };
  CHECK_THAT(support::shortest_failure(up_to(3), first, never, as_code),
             contains("do not fail so when they are replayed:\n  0\n  1\n  2\n"));
  const auto always = [&](const numbers&) { return std::optional(first); };
  CHECK_THAT(support::shortest_failure(up_to(3), first, always, as_code),
             contains("No call at all fails too (a rule: details), so these cannot be replayed:\n  0\n  1\n  2\n"));
  const auto other = [](const numbers& list) {
    return list.empty() ? std::nullopt : std::optional(support::failure{"another rule", ""});
  };
  CHECK_THAT(support::shortest_failure(up_to(3), first, other, as_code), contains("do not fail so"));
}
