#include "catch.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <tessera/layout/ragged_pages.hpp>
#include <tessera/runtime/page_plan.hpp>
#include <tessera/runtime/ragged_pool.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

namespace {

/// What a pool promises, in the plainest form: the pages of every sequence and group, and what was set aside.
struct plain_pool {
  index_t bound;
  std::vector<std::vector<std::vector<index_t>>> tables;
  std::vector<index_t> promised, copies;

  plain_pool(index_t most, index_t ids, index_t groups)
      : bound(most),
        tables(std::size_t(ids), std::vector<std::vector<index_t>>(std::size_t(groups))),
        promised(std::size_t(ids), 0),
        copies(promised) {}

  index_t pages_of(index_t id) const {
    index_t pages = 0;
    for (const auto& table : tables[std::size_t(id)]) pages += index_t(table.size());
    return pages;
  }
  std::map<index_t, index_t> holders() const {
    std::map<index_t, index_t> all;
    for (const auto& sequence : tables) {
      for (const auto& table : sequence) {
        for (const index_t page : table) ++all[page];
      }
    }
    return all;
  }
  offset_t claimed() const {
    offset_t all = offset_t(holders().size());
    for (std::size_t id = 0; id < tables.size(); ++id)
      all += std::max(0, promised[id] - pages_of(index_t(id))) + copies[id];
    return all;
  }
  bool fits() const { return bound == 0 || claimed() <= bound; }
};

}  // namespace

TEST_CASE(
    "a million random reservations, growths, compressions, forks, writes and closings lose no page and give none "
    "twice") {
  rng random(1230);
  constexpr index_t groups = 3, ids = 6, most = 64;
  for (const index_t bound : {most, 0}) {
    ragged_pool pool(groups, bound);
    plain_pool model(bound, ids, groups);
    for (index_t id = 0; id < ids; ++id) pool.open(id);
    index_t refused = 0, shared = 0, replaced = 0;
    for (index_t i = 0; i < support::scaled(500'000); ++i) {
      const index_t id = random.between(0, ids - 1), group = random.between(0, groups - 1);
      const auto at = std::size_t(id);
      auto& table = model.tables[at][std::size_t(group)];
      // Makes a call that may be refused: `changed` is the model behind it.
      const auto call = [&](plain_pool changed, bool asks_for_more, auto&& made) {
        if (!asks_for_more || changed.fits()) {
          made();
          model = std::move(changed);
          return true;
        }
        ++refused;
        REQUIRE_THROWS_AS(made(), error);
        return false;
      };
      const index_t what = random.between(0, 11);
      if (what < 2) {  // set aside
        plain_pool changed = model;
        changed.promised[at] = random.between(0, 30);
        changed.copies[at] = random.chance(0.5) ? pool.shared_pages(id) : 0;
        const bool more = changed.claimed() > model.claimed();
        call(changed, more, [&] { pool.reserve(id, changed.promised[at], changed.copies[at]); });
      } else if (what < 6) {  // append
        const index_t pages = random.between(0, 14), more = std::max(0, pages - index_t(table.size()));
        plain_pool changed = model;
        for (index_t page = 0; page < more; ++page) changed.tables[at][std::size_t(group)].push_back(-1 - page);
        const bool is_made = call(changed, more > 0, [&] { pool.acquire(id, group, pages); });
        const auto now = pool.pages(id, group);
        for (std::size_t page = 0; is_made && page < now.size(); ++page) {
          index_t& known = model.tables[at][std::size_t(group)][page];
          if (known >= 0) continue;
          known = now[page];
          REQUIRE((known >= 0 && known < pool.made()));
          REQUIRE(model.holders()[known] == 1);
        }
      } else if (what < 8) {  // compress
        const index_t pages = random.between(0, 10);
        pool.release(id, group, pages);
        while (index_t(table.size()) > pages) {
          if (model.holders()[table.back()] > 1) {
            index_t& less = model.copies[at] > 0 ? model.copies[at] : model.promised[at];
            if (&less == &model.copies[at] || less >= model.pages_of(id)) --less;
          }
          table.pop_back();
        }
      } else if (what < 9) {  // fork
        const index_t to = random.between(0, ids - 1);
        if (to == id) continue;
        pool.close(to);
        pool.share(id, to);
        model.tables[std::size_t(to)] = model.tables[at];
        model.promised[std::size_t(to)] = model.copies[std::size_t(to)] = 0;
        shared += pool.shared_pages(to) > 0;
      } else if (what < 11) {  // write to what is shared
        const auto holders = model.holders();
        std::vector<index_t> writes;
        for (std::size_t page = 0; page < table.size(); ++page) {
          if (holders.at(table[page]) > 1 && random.chance(0.5)) writes.push_back(index_t(page));
        }
        if (writes.empty()) continue;
        plain_pool changed = model;
        changed.copies[at] = std::max(0, model.copies[at] - index_t(writes.size()));
        for (std::size_t w = 0; w < writes.size(); ++w)
          changed.tables[at][std::size_t(group)][std::size_t(writes[w])] = -1 - index_t(w);
        const bool more = index_t(writes.size()) > model.copies[at];
        if (!call(changed, more, [&] { pool.plan_copies(id, index_t(writes.size())); })) continue;
        for (const index_t page : writes) {
          const index_t own = pool.replace(id, group, page);
          model.tables[at][std::size_t(group)][std::size_t(page)] = own;
          REQUIRE(holders.count(own) == 0);
        }
        ++replaced;
      } else {
        pool.close(id);
        for (auto& one : model.tables[at]) one.clear();
        model.promised[at] = model.copies[at] = 0;
      }
      const auto shown = pool.pages(id, group);
      const auto& expected = model.tables[at][std::size_t(group)];
      REQUIRE(std::equal(shown.begin(), shown.end(), expected.begin(), expected.end()));
      REQUIRE(pool.page_count(id) == model.pages_of(id));
      REQUIRE(pool.reserved(id) == model.promised[at]);
      REQUIRE((bound == 0 || pool.made() <= bound));
      if (i % 64 > 0) continue;
      const auto holders = model.holders();
      REQUIRE(pool.idle() + index_t(holders.size()) == pool.made());
      REQUIRE(pool.claimed() == model.claimed());
      index_t several = 0;
      for (const index_t page : expected) several += holders.at(page) > 1;
      REQUIRE(pool.shared_pages(id, group, 0, most) == several);
      REQUIRE(pool.any_shared() ==
              std::any_of(holders.begin(), holders.end(), [](auto& one) { return one.second > 1; }));
    }
    CHECK((refused > 0) == (bound > 0));
    CHECK(shared > 0);
    CHECK(replaced > 0);
    for (index_t id = 0; id < ids; ++id) pool.close(id);
    CHECK(pool.idle() == pool.made());
    CHECK(pool.claimed() == 0);
    CHECK_FALSE(pool.any_shared());
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
