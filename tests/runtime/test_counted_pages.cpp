// The pages of a pool that several tables may hold.
#include "catch.hpp"

#include <algorithm>
#include <map>
#include <vector>

#include <tessera/runtime/counted_pages.hpp>

#include "support/random.hpp"

using namespace tessera;

TEST_CASE("a million random growths, forks, writes and releases lose no page and give none twice") {
  support::rng random(4801);
  constexpr std::size_t tables = 8, most = 12;
  counted_pages pool;
  std::vector<host_vector<index_t>> held(tables);
  const auto holders = [&] {
    std::map<index_t, index_t> all;
    for (const auto& table : held) {
      for (const index_t page : table) ++all[page];
    }
    return all;
  };
  for (index_t i = 0; i < support::scaled(1'000'000); ++i) {
    auto& table = held[std::size_t(random.between(0, int(tables) - 1))];
    const index_t what = random.between(0, 9);
    if (what < 4 && table.size() < most) {
      pool.make_room(pool.used() + 1);
      table.push_back(pool.acquire());
      REQUIRE(pool.holders(table.back()) == 1);
    } else if (what < 6) {  // the newest pages go
      for (std::size_t left = std::size_t(random.between(0, int(table.size()))); table.size() > left;
           table.pop_back()) {
        const bool is_last = !pool.is_shared(table.back());
        REQUIRE(pool.release(table.back()) == is_last);
      }
    } else if (what < 8) {  // a fork
      auto& other = held[std::size_t(random.between(0, int(tables) - 1))];
      if (&other == &table) continue;
      for (const index_t page : other) pool.release(page);
      other = table;
      for (const index_t page : other) pool.share(page);
    } else if (!table.empty()) {  // a write
      index_t& page = table[std::size_t(random.between(0, int(table.size()) - 1))];
      if (!pool.is_shared(page)) continue;
      pool.make_room(pool.used() + 1);
      const index_t own = pool.acquire();
      REQUIRE_FALSE(pool.release(page));
      page = own;
    }
    if (i % 64 > 0) continue;
    const auto all = holders();
    REQUIRE(pool.used() == index_t(all.size()));
    REQUIRE(pool.made() == pool.used() + pool.idle());
    index_t shared = 0;
    offset_t bytes = 0;
    for (const auto& [page, count] : all) {
      REQUIRE(pool.holders(page) == count);
      REQUIRE(pool.is_shared(page) == (count > 1));
      shared += count > 1;
    }
    REQUIRE(pool.any_shared() == (shared > 0));
    const std::size_t first = std::size_t(random.between(0, int(most)));
    index_t from_first = 0;
    for (std::size_t at = first; at < table.size(); ++at) from_first += all.at(table[at]) > 1;
    REQUIRE(pool.shared_of(table, first, table.size() + 3) == from_first);
    for (const auto& each : held) bytes += pool.bytes(each, 5040);
    REQUIRE(bytes == 5040 * offset_t(all.size()));  // so many bytes can be shared by up to ten
  }
  for (auto& table : held) {
    for (const index_t page : table) pool.release(page);
  }
  CHECK(pool.used() == 0);
  CHECK_FALSE(pool.any_shared());
}

TEST_CASE("the parts of a shared page make at least the page") {
  counted_pages pool(1);
  const host_vector<index_t> table{pool.acquire()};
  pool.share(table[0]);
  pool.share(table[0]);
  CHECK(3 * pool.bytes(table, 100) == 102);
}
