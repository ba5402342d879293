// Segments of a prompt, each packed by a strategy that is searched for it.
#include "catch.hpp"

#include <cmath>
#include <tuple>

#include <tessera/cache.hpp>
#include <tessera/layout/packed/as_given.hpp>
#include <tessera/methods/mosaickv.hpp>

#include "support/searched_rows.hpp"

using namespace tessera;
using namespace support::searched;

TEST_CASE("each segment of a prompt is packed by the strategy that is best for it, and the answer by the last one's") {
  using mosaic = mosaickv<fp32, dim>;
  mosaic recipe = searching<mosaic>();
  recipe.layout.rows.segment = 320;  // the second one begins behind `drift`, where rows are others
  const index_t prompt = 320 + 1344;
  cache<mosaic> held({layers, q_heads, kv_heads}, recipe, std::make_shared<cpu::executor>(2));
  const index_t id = held.open();
  for (index_t layer = 0; layer < layers; ++layer) {
    std::vector<float> all[3];
    for (index_t t = 0; t < prompt; ++t) {
      for (const index_t side : {0, 1, 2}) {
        const auto rows = rows_of<float>(t, layer, side, side == 2 ? q_heads : kv_heads, 0.5);
        all[side].insert(all[side].end(), rows.begin(), rows.end());
      }
    }
    held.prefill(layer, id, nhd_rows<const float>(all[2].data(), prompt, q_heads, dim),
                 nhd_rows<const float>(all[0].data(), prompt, kv_heads, dim),
                 nhd_rows<const float>(all[1].data(), prompt, kv_heads, dim));
  }
  held.end_prefill(id);
  std::size_t formats = 0;
  for (index_t layer = 0; layer < layers; ++layer) {
    const auto view = held.view(layer, id);
    index_t first = 0;
    for (const auto& segment : *view.segments) {
      const index_t count = segment->lengths[0];
      strategy_search<top_groups> search(recipe.layout.rows.key);
      for (index_t h = 0; h < kv_heads; ++h) {
        for (const index_t side : {0, 1}) {
          const auto load = [&](index_t i, float* to) {
            std::copy_n(rows_of<float>(first + i, layer, side, kv_heads, 0.5).data() + h * dim, dim, to);
          };
          search.add(count, dim, 48, "rows", load);
          if (side == 0) search.add_blocks(count, dim, load);
        }
      }
      const segment_strategy best = search.best(0.1f, 0.5f, 32);
      CHECK(segment->format.k.stored_channels == index_t(best.channels * float(dim)));
      CHECK(segment->format.v.stored_channels == segment->format.k.stored_channels);
      CHECK(segment->format.k.group == best.group);
      CHECK(segment->format.block == best.block);
      formats += segment != view.segments->front() && !(segment->format == view.segments->front()->format);
      first += count;
    }
    CHECK(view.segments->size() >= 3);
    CHECK(first == prompt / 32 * 32);
  }
  CHECK(formats >= 2);
}
TEST_CASE("segments that no block of a search divides have the smallest blocks, and a shorter one at their end") {
  using mosaic = mosaickv<fp32, dim>;
  mosaic recipe = searching<mosaic>();
  recipe.layout.rows.segment = 330;
  recipe.layout.rows.strategy.channel_loss = 0;  // the most channels, so that means are near those of the rows
  cache<mosaic> held({1, 2, 1}, recipe, std::make_shared<cpu::executor>(1));
  held.open();
  std::vector<float> rows;
  for (index_t t = 0; t < 1000; ++t) {
    const auto row = rows_of<float>(t + drift, 0, 0, 1, 0.5);  // falls fast: little is left out
    rows.insert(rows.end(), row.begin(), row.end());
  }
  const auto k = nhd_rows<const float>(rows.data(), 1000, 1, dim);
  held.prefill(0, 0, nhd_rows<const float>(rows.data(), 0, 2, dim), k, k);
  held.end_prefill(0);
  const auto view = held.view(0, 0);
  REQUIRE(view.segments->size() >= 2);
  const auto& segment = *view.segments->front();
  REQUIRE(segment.lengths[0] == 330);
  CHECK(segment.format.block == 4);
  REQUIRE(segment.blocks(0) == 83);
  // q . mean of the last block, of rows 328 and 329, and of the one before.
  std::vector<float> q(dim, 0.0f), turned(dim, 0.0f);
  for (index_t d = 0; d < dim; ++d) q[std::size_t(d)] = rows[std::size_t(329 * dim + d)];
  const float* basis = segment.k_basis(0, dim);
  for (index_t c = 0; c < segment.format.k.channels; ++c) {
    for (index_t d = 0; d < dim; ++d) turned[std::size_t(c)] += basis[c * dim + d] * q[std::size_t(d)];
  }
  for (const auto& [block, first, last] : {std::tuple{82, 328, 330}, std::tuple{81, 324, 328}}) {
    double expected = 0, size = 0;
    for (index_t t = first; t < last; ++t) {
      for (index_t d = 0; d < dim; ++d)
        expected += double(q[std::size_t(d)]) * double(rows[std::size_t(t * dim + d)]) / (last - first);
    }
    for (const float x : q) size += double(x) * double(x);
    CHECK(std::abs(double(segment.mean_dot(0, block, turned.data())) - expected) < 0.1 * size);
  }
}

TEST_CASE("a search for rows that are not rotated is refused in a sentence") {
  using rows_type = packed_rows<dense_rows<fp32, dim>, top_groups, top_groups, as_given, full_tails, searched_strategy>;
  using method = recipe<retain_all, stored<rows_type, runs>, retrieve<block_mean, whole_blocks>, gathered_decode, once>;
  method given;
  given.set_budget(64);
  CHECK_NOTHROW(cache<method>({1, 2, 1}, given, std::make_shared<cpu::executor>(1)));
  given.layout.rows.strategy.strategy = strategy_choice::searched;
  CHECK_THROWS_WITH(cache<method>({1, 2, 1}, given, std::make_shared<cpu::executor>(1)),
                    contains("strategy is searched; expected fixed for rows that are not rotated"));
}

TEST_CASE("searches that could find nothing that fits are refused") {
  using mosaic = mosaickv<fp32, dim>;
  const auto refused = [](auto change) -> std::string {
    mosaic recipe = searching<mosaic>();
    change(recipe);
    try {
      cache<mosaic>({1, 2, 1}, recipe, std::make_shared<cpu::executor>(1));
    } catch (const error& refusal) {
      return refusal.what();
    }
    return "nothing was thrown";
  };
  CHECK_THAT(refused([](mosaic& r) { r.layout.rows.basis.truncate = 0.7f; }), contains("at most what truncate leaves"));
  CHECK_THAT(refused([](mosaic& r) { r.layout.rows.tail.tail = 6, r.retrieve.selector.block = 3; }),
             contains("tail is 6; expected a multiple of the smallest block that is searched"));
  CHECK_THAT(refused([](mosaic& r) { r.layout.rows.strategy.channel_loss = 1.5f; }), contains("channel_loss is 1.5"));
  CHECK(refused([](mosaic&) {}) == "nothing was thrown");
}
