// A conversation whose rows change on the way, for caches that search strategies, and a search that is done at once.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "random.hpp"
#include "tessera/layout/packed/searched_strategy.hpp"
#include "tessera/runtime/background.hpp"

namespace support::searched {

using namespace tessera;

constexpr index_t layers = 2, q_heads = 4, kv_heads = 2, dim = 64, drift = 300;

/// Segments that end soon, and bases of 128 rows that others join.
template <class Mosaic>
Mosaic searching(index_t least = 64) {
  Mosaic recipe;
  recipe.set_budget(64);
  auto& strategy = recipe.layout.rows.strategy;
  strategy.strategy = strategy_choice::searched;
  strategy.least_segment = least;
  strategy.reference = 128;
  recipe.layout.rows.segment = 128;
  strategy.channel_loss = 0.1f, strategy.block_spread = 0.5f;
  return recipe;
}

/// Rows of a token, the same in every conversation. From token `drift` on other channels are the strong ones, and channels
/// fall by exp(-later) from one to the next.
template <class T>
std::vector<T> rows_of(index_t token, index_t layer, index_t side, index_t heads, double later) {
  rng random(std::uint64_t(token) * 64 + std::uint64_t(layer * 4 + side));
  std::vector<T> rows;
  for (index_t h = 0; h < heads; ++h) {
    for (index_t d = 0; d < dim; ++d) {
      const index_t rank = token < drift ? d : (d * 13 + 31) % dim;
      rows.push_back(T(random.normal() * float(std::exp((token < drift ? -0.12 : -later) * double(rank)))));
    }
  }
  return rows;
}

/// Does what it is told at once and says so when it is asked to.
struct at_once final : background {
  std::vector<std::shared_ptr<background_task>> held;
  std::atomic<bool> stopping{false};
  void start(std::shared_ptr<background_task> task) override {
    task->perform(stopping);
    held.push_back(std::move(task));
  }
  void publish() {
    for (const auto& task : held) task->publish();
    held.clear();
  }
};

}  // namespace support::searched
