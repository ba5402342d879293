#include "catch.hpp"

#include <algorithm>
#include <set>

#include <tessera/core/engine/head_groups.hpp>

#include "support/random.hpp"

using namespace tessera;
using support::rng;

TEST_CASE("heads of a layer are grouped by their shares, the smaller first, equal ones by number") {
  const std::vector<double> shares{0.9, 0.1, 0.5, 0.1, 0.2, 0.2, 0.8, 0.1};  // two layers of four
  const head_groups by_layer = group_heads(2, 4, 2, clustering::layer, shares);
  CHECK(by_layer.members == std::vector<index_t>{1, 3, 2, 0, 7, 4, 5, 6});
  CHECK(by_layer.count() == 4);
  const head_groups by_model = group_heads(2, 4, 2, clustering::model, shares);
  CHECK(by_model.members == std::vector<index_t>{1, 3, 7, 4, 5, 2, 6, 0});
  CHECK(group_heads(2, 4, 2, clustering::none, shares).members == std::vector<index_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(group_heads(2, 4, 2, clustering::layer, {}).members == std::vector<index_t>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(filled_shares(by_layer, shares) == std::vector<double>{0.9, 0.1, 0.9, 0.1, 0.2, 0.8, 0.8, 0.2});
}

TEST_CASE("every head has one group and one column, and no clustering wastes more than a wider one") {
  rng random(1231);
  for (index_t i = 0; i < support::scaled(500); ++i) {
    const index_t layers = random.between(1, 6), heads = random.pick({1, 2, 4}),
                  kv_heads = heads * random.between(1, 4);
    std::vector<double> shares;
    for (index_t h = 0; h < layers * kv_heads; ++h) shares.push_back(random.pick({0.25, 0.5, random.uniform()}));
    const auto slack = [&](clustering among) {
      const head_groups groups = group_heads(layers, kv_heads, heads, among, shares);
      std::set<std::pair<index_t, index_t>> seen;
      double empty = 0;
      const auto filled = filled_shares(groups, shares);
      for (index_t h = 0; h < layers * kv_heads; ++h) {
        const index_t group = groups.group[std::size_t(h)], column = groups.column[std::size_t(h)];
        REQUIRE(groups.row(group)[std::size_t(column)] == h);
        seen.insert({group, column});
        if (among != clustering::model) REQUIRE(group / (kv_heads / heads) == h / kv_heads);
        REQUIRE(filled[std::size_t(h)] >= shares[std::size_t(h)]);
        empty += filled[std::size_t(h)] - shares[std::size_t(h)];
      }
      REQUIRE(index_t(seen.size()) == layers * kv_heads);
      return empty;
    };
    const double none = slack(clustering::none), layer = slack(clustering::layer), model = slack(clustering::model);
    REQUIRE(layer <= none + 1e-12);
    REQUIRE(model <= layer + 1e-12);
  }
}

TEST_CASE("fitted groups are narrow where heads stand far apart, and their blocks cover their pages once") {
  // Two heads that keep much more than all others, and more than each other.
  const std::vector<double> shares{0.1, 0.1, 0.1, 0.9, 0.5, 0.1, 0.1, 0.1};
  const head_groups groups = group_heads(2, 4, 4, clustering::fitted, shares);
  CHECK(groups.begins == std::vector<index_t>{0, 2, 6, 7, 8});
  CHECK(groups.members == std::vector<index_t>{0, 1, 2, 5, 6, 7, 4, 3});
  CHECK(groups.pages_for(0, 33, 16) == 2);  // two heads: a page has 32 tokens of each
  CHECK(groups.pages_for(1, 33, 16) == 3);
  CHECK(groups.pages_for(3, 33, 16) == 1);
  const std::vector<index_t> pages{7, 3};
  std::vector<index_t> blocks;
  for (index_t i = 0; i < 4; ++i) blocks.push_back(groups.block(1, i, pages));
  CHECK(blocks == std::vector<index_t>{29, 31, 13, 15});
  CHECK(group_heads(2, 4, 4, clustering::fitted, {}).begins == std::vector<index_t>{0, 4, 8});

  rng random(1232);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t layers = random.between(1, 6), heads = random.pick({1, 2, 3, 4, 6, 8}),
                  kv_heads = heads * random.between(1, 3);
    std::vector<double> own;
    for (index_t h = 0; h < layers * kv_heads; ++h) own.push_back(random.pick({0.25, 0.5, random.uniform()}));
    const auto slots = [&](clustering among) {
      const head_groups made = group_heads(layers, kv_heads, heads, among, own);
      REQUIRE(made.begins.back() == layers * kv_heads);
      double most = 0;
      for (index_t one = 0; one < made.count(); ++one) {
        REQUIRE(heads % made.size(one) == 0);
        const std::vector<index_t> held{2, 5};
        std::set<index_t> seen;
        double longest = 0;
        for (const index_t head : made.row(one)) {
          REQUIRE(made.group[std::size_t(head)] == one);
          for (index_t b = 0; b < 2 * made.blocks_of_page(one); ++b) seen.insert(made.block(head, b, held));
          longest = std::max(longest, own[std::size_t(head)]);
        }
        // All columns of both pages, each by one head.
        REQUIRE(index_t(seen.size()) == 2 * heads);
        REQUIRE((*seen.begin() == 2 * heads && *seen.rbegin() == 6 * heads - 1));
        most += longest * made.size(one) * 8192 + heads * 8;
      }
      return most;
    };
    REQUIRE(slots(clustering::fitted) <= slots(clustering::model) + 1e-6);
  }
}

TEST_CASE("heads that do not divide are refused") {
  CHECK_THROWS_WITH(
      group_heads(2, 4, 3, clustering::layer, {}),
      contains("heads is 3; expected a divisor of the 4 KV heads of a layer; pass how many KV heads share"));
  CHECK_THROWS_WITH(group_heads(2, 4, 3, clustering::model, {}), contains("a divisor of the 8 KV heads of the model"));
  CHECK_THROWS_WITH(group_heads(2, 4, 0, clustering::none, {}), contains("heads is 0"));
  CHECK_NOTHROW(group_heads(2, 4, 8, clustering::model, {}));
}
