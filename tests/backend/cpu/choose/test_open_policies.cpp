// Policies that exist only in the tests, run by the CPU: exactly what their definitions say.
#include "catch.hpp"

#include <tessera/budget/adaptive.hpp>
#include <tessera/budget/pyramid.hpp>
#include <tessera/budget/uniform.hpp>
#include <tessera/scorer/accumulated_attention.hpp>
#include <tessera/selector/top_tokens.hpp>

#include "support/choose_case.hpp"

using namespace tessera;
using namespace support;

namespace {

template <class Scorer, class Budget, class Selector>
void compare() {
  support::rng random(97);
  for (index_t i = 0; i < scaled(400); ++i) {
    const layer_case c(random, random.between(1, 3), random.between(1, 5), random.between(1, 120));
    for (const bool by_sequence : {false, true}) {
      CAPTURE(Scorer::name, Budget::name, Selector::name, c.sequences, c.heads, c.capacity, by_sequence, i);
      retain<Scorer, Budget, Selector> policy;
      policy.budget.tokens = random.between(1, c.capacity);
      REQUIRE(on_host(c, policy, by_sequence) == by_definition(c, policy, by_sequence));
    }
  }
}

}  // namespace

TEST_CASE("a last pass, budgets and selectors that a test defines do on the CPU what they say") {
  compare<spread_window, uniform, top_tokens>();
  compare<accumulated_attention, every_other_head, top_tokens>();
  compare<spread_window, every_other_head, spaced>();
  compare<accumulated_attention, half_won, top_tokens>();
  compare<spread_window, half_won, top_tokens>();
  compare<accumulated_attention, uniform, spaced>();
}

TEST_CASE("a budget's bounds hold what it gives") {
  support::rng random(98);
  for (index_t i = 0; i < scaled(2000); ++i) {
    layer_case c(random, 1, random.between(1, 5), random.between(1, 80));
    if (random.chance(0.3)) c.lengths.assign(c.lengths.size(), c.capacity);
    const index_t longest = *std::max_element(c.lengths.begin(), c.lengths.end()), tail = c.tails[0];
    const auto check = [&](auto budget) {
      budget.tokens = random.between(1, 80);
      CAPTURE(decltype(budget)::name, budget.tokens, tail, longest);
      retain<accumulated_attention, decltype(budget), top_tokens> policy;
      policy.budget = budget;
      offset_t total = 0;
      const token_bound bound = bound_kept(budget, {1, 4, c.heads, tail, longest});
      for (const auto& row : on_host(c, policy, false)) {
        REQUIRE(index_t(row.size()) <= bound.longest);
        const bool even = *std::min_element(c.lengths.begin(), c.lengths.end()) == longest;
        if (even && keeps_heads_even<decltype(budget)>) REQUIRE(index_t(row.size()) == bound.longest);
        total += offset_t(row.size());
      }
      REQUIRE(total <= bound.total);
    };
    check(uniform{});
    check(pyramid{});
    check(adaptive{});
    check(every_other_head{});
    check(half_won{});
  }
}
