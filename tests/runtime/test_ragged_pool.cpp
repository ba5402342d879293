#include "catch.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include <tessera/layout/ragged_pages.hpp>
#include <tessera/runtime/page_plan.hpp>
#include <tessera/runtime/ragged_pool.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

TEST_CASE(
    "a million random reservations, growths, compressions, releases and closings lose no page and give none twice") {
  rng random(1230);
  constexpr index_t groups = 3, ids = 6, most = 64;
  for (const index_t bound : {most, 0}) {
    ragged_pool pool(groups, bound);
    // The model: who holds each page, and what each sequence was promised.
    std::map<index_t, std::pair<index_t, index_t>> owner;
    std::vector<std::vector<std::vector<index_t>>> tables(ids, std::vector<std::vector<index_t>>(groups));
    std::vector<index_t> promised(ids, 0);
    for (index_t id = 0; id < ids; ++id) pool.open(id);
    const auto held = [&](index_t id) {
      index_t pages = 0;
      for (const auto& table : tables[std::size_t(id)]) pages += index_t(table.size());
      return pages;
    };
    const auto claimed = [&](index_t but, index_t claim) {
      offset_t all = claim;
      for (index_t id = 0; id < ids; ++id) all += id == but ? 0 : std::max(held(id), promised[std::size_t(id)]);
      return all;
    };
    index_t refused = 0;
    for (index_t i = 0; i < support::scaled(500'000); ++i) {
      const index_t id = random.between(0, ids - 1), group = random.between(0, groups - 1);
      auto& table = tables[std::size_t(id)][std::size_t(group)];
      const index_t what = random.between(0, 9);
      if (what < 2) {  // set aside
        const index_t pages = random.between(0, 30);
        const bool fits =
            bound == 0 || pages <= promised[std::size_t(id)] || claimed(id, std::max(held(id), pages)) <= bound;
        if (fits) {
          pool.reserve(id, pages);
          promised[std::size_t(id)] = pages;
        } else {
          ++refused;
          REQUIRE_THROWS_AS(pool.reserve(id, pages), error);
        }
      } else if (what < 6) {  // append
        const index_t pages = random.between(0, 14), more = std::max(0, pages - index_t(table.size()));
        const bool fits =
            bound == 0 || more == 0 || claimed(id, std::max(held(id) + more, promised[std::size_t(id)])) <= bound;
        if (fits) {
          pool.acquire(id, group, pages);
          for (const index_t page : pool.pages(id, group).subspan(table.size())) {
            REQUIRE(owner.count(page) == 0);
            REQUIRE((page >= 0 && page < pool.made()));
            owner[page] = {id, group};
            table.push_back(page);
          }
        } else {
          ++refused;
          REQUIRE_THROWS_AS(pool.acquire(id, group, pages), error);
        }
      } else if (what < 9) {  // compress
        const index_t pages = random.between(0, 10);
        pool.release(id, group, pages);
        while (index_t(table.size()) > pages) {
          owner.erase(table.back());
          table.pop_back();
        }
      } else {
        pool.close(id);
        for (auto& one : tables[std::size_t(id)]) {
          for (const index_t page : one) owner.erase(page);
          one.clear();
        }
        promised[std::size_t(id)] = 0;
      }
      const auto shown = pool.pages(id, group);
      REQUIRE(std::equal(shown.begin(), shown.end(), table.begin(), table.end()));
      REQUIRE(pool.page_count(id) == held(id));
      REQUIRE(pool.reserved(id) == promised[std::size_t(id)]);
      REQUIRE(pool.idle() + index_t(owner.size()) == pool.made());
      REQUIRE((bound == 0 || pool.made() <= bound));
      if (i % 64 == 0) REQUIRE(pool.claimed() == claimed(0, std::max(held(0), promised[0])));
    }
    CHECK((refused > 0) == (bound > 0));
    for (index_t id = 0; id < ids; ++id) pool.close(id);
    CHECK(pool.idle() == pool.made());
    CHECK(pool.claimed() == 0);
  }
}

TEST_CASE("what was set aside for one sequence is not given to another") {
  ragged_pool pool(1, 10);
  pool.open(0);
  pool.open(1);
  pool.reserve(0, 7);
  pool.acquire(1, 0, 3);
  CHECK_THROWS_WITH(pool.acquire(1, 0, 4), contains("pages of the pool is 10; expected at least 11; close a sequence"));
  CHECK_THROWS_WITH(pool.reserve(1, 4),
                    contains("pages of the pool is 10; expected at least 11, with 4 for this sequence; "
                             "close a sequence, shorten the prompt, or give the pool more pages"));
  CHECK(pool.page_count(1) == 3);
  pool.acquire(0, 0, 7);
  pool.reserve(0, 0);  // a prompt has ended with 5 pages
  pool.release(0, 0, 5);
  CHECK_NOTHROW(pool.acquire(1, 0, 5));
}

TEST_CASE("a plan of more pages than 32 bits count asks for as many as they do, and a pool with a bound refuses it") {
  constexpr index_t layers = 256, tokens = 1 << 24, all = std::numeric_limits<index_t>::max();
  ragged_pages where;
  where.heads = where.page = 1;
  const auto groups = where.groups(layers, 1);
  const page_plan plan = plan_pages(
      groups, 1, std::vector<index_t>(layers, 0), {tokens, 0, 0}, [](index_t, index_t, index_t seen) { return seen; },
      [](index_t) { return true; }, [](index_t) { return 0; });
  CHECK(plan.final_pages == std::vector<index_t>(layers, tokens));
  CHECK(plan.peak == all);
  ragged_pool pool(layers, 1000);
  pool.open(0);
  CHECK_THROWS_AS(pool.reserve(0, plan.peak), error);
}
