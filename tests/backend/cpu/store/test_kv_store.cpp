#include "catch.hpp"

#include <numeric>
#include <set>

#include <tessera/backend/cpu/store/kv_store.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>

#include "laws/layouts.hpp"
#include "support/open_layouts.hpp"

using namespace tessera;

namespace {

/// Appends and keeps rows of ones in one place of two kv_heads.
template <class Layout>
struct one_place {
  cpu::kv_store<Layout> store{1, 2, {}};
  std::vector<float> rows = std::vector<float>(4000 * 2 * 64, 1.0f);
  std::vector<index_t> next = std::vector<index_t>(4, 0);
  cpu::executor workers{1};

  void append(index_t tokens, index_t id = 0) {
    const auto view = nhd_rows<const float>(rows.data(), tokens, 2, 64);
    store.append({0, id}, view, view, next[std::size_t(id)]);
    next[std::size_t(id)] += tokens;
  }
  void keep_first(index_t one, index_t other) {
    selection chosen;
    chosen.reset({one, other});
    chosen.counts = {one, other};
    for (index_t h = 0; h < 2; ++h) std::iota(chosen.row(h), chosen.row(h) + chosen.counts[std::size_t(h)], 0);
    store.keep({0, 0}, chosen, workers);
  }
};

}  // namespace

TEST_CASE("a layout of a test's own obeys the laws of layouts") {
  support::obeys_the_laws_of_layouts<stored<support::integer_rows<fp32, 64, 80>, fixed_pages<8>>>(118);
}

TEST_CASE("runs grow by a 64th, at least 16 tokens, and give back what a quarter of is unused") {
  one_place<dense<fp32, 64>> place;
  place.store.open(0);
  const auto bytes = [&] { return place.store.bytes({0, 0}); };
  CHECK(bytes() == 0);
  constexpr offset_t token = 2 * 128 * 4;  // K and V of both heads
  place.append(184);
  CHECK(bytes() == 200 * token);
  place.append(16);
  CHECK(bytes() == 200 * token);
  place.keep_first(200, 200);
  CHECK(bytes() == 200 * token);  // nothing was dropped, so no positions either
  place.keep_first(150, 150);
  CHECK(bytes() == 200 * (token + 2 * 4));
  place.keep_first(149, 149);  // 149 * 4 < 200 * 3
  CHECK(bytes() == 149 * (token + 2 * 4));
  place.append(1);
  CHECK(bytes() == (150 + 16) * (token + 2 * 4));
  CHECK(place.store.position({0, 0}, 1, 149) == 200);
  place.append(1850);
  CHECK(bytes() == (2000 + 31) * (token + 2 * 4));
}

TEST_CASE("fixed pages hold what the longest head needs and give back whole pages") {
  one_place<stored<dense_rows<fp32, 64>, fixed_pages<16>>> place;
  place.store.open(0);
  constexpr offset_t page = 16 * 2 * 128 * 4;
  CHECK(place.store.bytes({0, 0}) == 0);
  place.append(1);
  CHECK(place.store.bytes({0, 0}) == page);
  place.append(15);
  CHECK(place.store.bytes({0, 0}) == page);
  place.append(100);
  CHECK(place.store.bytes({0, 0}) == 8 * page);
  place.keep_first(3, 33);  // the longer head says how many
  constexpr offset_t positions = (3 + 33) * 4;
  CHECK(place.store.bytes({0, 0}) == 3 * page + positions);
  place.append(15);
  CHECK(place.store.lengths({0, 0}) == std::vector<index_t>{18, 48});
  place.store.clear(0);
  CHECK(place.store.bytes({0, 0}) == 0);
}

TEST_CASE("sequences share a pool of fixed pages, and pages that one gives back are taken by another") {
  one_place<stored<dense_rows<fp32, 64>, fixed_pages<16>>> place;
  const auto pages = [&](index_t id) {
    const auto view = place.store.view({0, id});
    const index_t count = ceil_div(place.next[std::size_t(id)], 16);
    return std::set<index_t>(view.table.indices, view.table.indices + count);
  };
  place.store.open(0);
  place.store.open(1);
  place.append(320, 0);
  place.append(160, 1);
  CHECK(place.store.view({0, 0}).k == place.store.view({0, 1}).k);
  const auto of_first = pages(0), of_second = pages(1);
  CHECK(of_first.size() == 20);
  for (const index_t page : of_second) CHECK(of_first.count(page) == 0);
  place.store.clear(0);
  place.next[0] = 0;
  place.append(100, 1);
  place.store.open(2);
  place.append(200, 2);
  // 7 and 13 pages more: exactly the 20 that were given back.
  auto taken = pages(2);
  for (const index_t page : pages(1)) {
    if (of_second.count(page) == 0) taken.insert(page);
  }
  CHECK(taken == of_first);
}

TEST_CASE("appended rows are rounded to the stored type") {
  cpu::kv_store<dense<bf16, 64, 80>> store(1, 1, {});
  store.open(0);
  const std::vector<float> k(64, 1.00390625f), v(80, -3.14159f);
  store.append({0, 0}, nhd_rows<const float>(k.data(), 1, 1, 64), nhd_rows<const float>(v.data(), 1, 1, 80), 0);
  CHECK(store.view({0, 0}).key(0, 0, 0)[63].bits == bf16(1.00390625f).bits);
  CHECK(store.view({0, 0}).value(0, 0, 0)[79].bits == bf16(-3.14159f).bits);
}

TEST_CASE(
    "pages that a sequence takes stay below the bound that is known before its prompt, and meet it when nothing is "
    "dropped") {
  using layout = stored<dense_rows<fp32, 64>, fixed_pages<16>>;
  constexpr index_t layers = 3, kv_heads = 2;
  const offset_t page_bytes = 16 * kv_heads * layout::token_bytes();
  support::rng random(119);
  cpu::executor workers(1);
  for (index_t i = 0; i < support::scaled(100); ++i) {
    cpu::kv_store<layout> store(layers, kv_heads, {});
    store.open(0);
    index_t tokens = 0;
    bool dropped = false;
    for (int operation = 0; operation < 8; ++operation) {
      const index_t more = random.pick({1, 15, 16, 17, 60});
      const auto rows = support::normals(random, std::size_t(more * kv_heads * 64));
      const auto view = nhd_rows(rows.data(), more, kv_heads, 64);
      for (index_t layer = 0; layer < layers; ++layer) store.append({layer, 0}, view, view, tokens);
      tokens += more;
      offset_t pages = 0;
      for (index_t layer = 0; layer < layers; ++layer) {
        const auto longest = *std::max_element(store.lengths({layer, 0}).begin(), store.lengths({layer, 0}).end());
        const offset_t bytes = store.bytes({layer, 0});
        pages += fixed_pages<16>::pages_for(longest);
        REQUIRE(bytes >= fixed_pages<16>::pages_for(longest) * page_bytes);
        REQUIRE((dropped || bytes / page_bytes == fixed_pages<16>::pages_for(longest)));
      }
      const offset_t bound = fixed_pages<16>::upper_bound_pages(tokens, layers);
      REQUIRE(pages <= bound);
      REQUIRE((dropped || pages == bound));
      if (random.chance(0.4)) {
        const index_t layer = random.between(0, layers - 1);
        dropped |= store.keep({layer, 0}, support::random_subset(random, store.lengths({layer, 0}), 0.5), workers);
      }
    }
  }
}
