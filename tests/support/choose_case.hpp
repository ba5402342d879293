// Random layers for choose_kept, what the CPU keeps of them, and what the definitions of the tests' own policies say.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include <tessera/backend/cpu/choose/retain.hpp>

#include "support/open_policies.hpp"
#include "support/random.hpp"

namespace support {

/// A layer of a batch: scores that are multiples of 1/4, so that ties are frequent and halves exact.
struct layer_case {
  index_t sequences, heads, capacity;
  std::vector<float> scores;
  std::vector<index_t> lengths, tails, budgets;

  layer_case(rng& random, index_t b, index_t h, index_t n)
      : sequences(b), heads(h), capacity(n), scores(std::size_t(b) * std::size_t(h) * std::size_t(n)) {
    for (auto& x : scores) x = random.chance(0.03) ? std::nanf("") : float(random.between(-8, 40)) * 0.25f;
    for (index_t r = 0; r < b * h; ++r) lengths.push_back(random.between(1, n));
    for (index_t s = 0; s < b; ++s) tails.push_back(random.between(0, 12)), budgets.push_back(random.between(1, n));
  }
};

using lists = std::vector<std::vector<index_t>>;

template <class Policy>
lists on_host(const layer_case& c, Policy policy, bool by_sequence, index_t granularity = 1) {
  lists rows;
  for (index_t b = 0; b < c.sequences; ++b) {
    std::vector<offset_t> offsets;
    for (index_t h = 0; h < c.heads; ++h) offsets.push_back(offset_t(b * c.heads + h) * c.capacity);
    layer_scores of;
    of.layer = 1;
    of.layers = 4;
    of.kv_heads = c.heads;
    of.protected_tail = c.tails[std::size_t(b)];
    of.tokens = c.lengths.data() + b * c.heads;
    of.offsets = offsets.data();
    of.scores = c.scores.data();
    if (by_sequence) policy.budget.tokens = c.budgets[std::size_t(b)];
    selection kept;
    cpu::retain_workspace workspace;
    cpu::slot_facts beside;
    beside.granularity = granularity;
    cpu::choose_kept(policy, of, kept, workspace, beside);
    for (index_t h = 0; h < c.heads; ++h) rows.emplace_back(kept.row(h), kept.row(h) + kept.counts[std::size_t(h)]);
  }
  return rows;
}

/// The definition, for the policies of this file: whole sorts of doubles, no counting.
template <class Policy>
lists by_definition(const layer_case& c, const Policy& policy, bool by_sequence) {
  using budget = typename Policy::budget_type;
  using selector = typename Policy::selector_type;
  const double last = -std::numeric_limits<double>::infinity();
  lists rows;
  for (index_t b = 0; b < c.sequences; ++b) {
    const index_t tokens = by_sequence ? c.budgets[std::size_t(b)] : policy.budget.tokens;
    const index_t tail = c.tails[std::size_t(b)], base = std::max(0, tokens - tail);
    const index_t* length = c.lengths.data() + b * c.heads;
    std::vector<std::vector<double>> finished;
    for (index_t h = 0; h < c.heads; ++h) {
      const float* raw = c.scores.data() + std::size_t(b * c.heads + h) * std::size_t(c.capacity);
      const index_t n = std::max(0, length[h] - tail);
      finished.emplace_back();
      for (index_t i = 0; i < n; ++i) {
        double score = raw[i];
        if (device_scorer<typename Policy::scorer_type> && slot_finishing_scorer<typename Policy::scorer_type>) {
          for (const index_t j : {i - 1, i + 1}) {
            if (j >= 0 && j < n && raw[j] / 2.0 > (std::isnan(score) ? last : score) && !std::isnan(raw[i])) {
              score = raw[j] / 2.0;
            }
          }
        }
        finished.back().push_back(std::isnan(score) ? last : score);
      }
    }
    std::vector<std::tuple<double, index_t, index_t>> all;  // best first: score, then head, then slot
    for (index_t h = 0; h < c.heads; ++h) {
      for (index_t i = 0; i < index_t(finished[std::size_t(h)].size()); ++i) {
        all.emplace_back(-finished[std::size_t(h)][std::size_t(i)], h, i);
      }
    }
    std::sort(all.begin(), all.end());
    const bool whole = *std::max_element(length, length + c.heads) <= tokens;
    bool short_enough = true;
    for (index_t h = 0; h < c.heads; ++h) short_enough &= std::max(0, length[h] - tail) <= base;
    for (index_t h = 0; h < c.heads; ++h) {
      const auto& scores = finished[std::size_t(h)];
      index_t count = std::min(tokens, length[h]);
      if constexpr (std::is_same_v<budget, every_other_head>) {
        if (h % 2 == 0) count = length[h];
      } else if constexpr (std::is_same_v<budget, half_won>) {
        index_t won = 0;
        for (std::size_t i = 0; i < std::min(all.size(), std::size_t(c.heads * base)); ++i)
          won += std::get<1>(all[i]) == h;
        count = short_enough ? length[h] : tail + (won + base) / 2;
      }
      if (whole) count = length[h];
      count = std::min(std::max(count, std::min(tail, length[h])), length[h]);
      const index_t newest = std::min(tail, count), room = count - newest, n = length[h] - newest;
      std::set<index_t> kept;
      if constexpr (std::is_same_v<selector, spaced>) {
        for (index_t i = 0; i < room; ++i) kept.insert(index_t(offset_t(i) * n / room));
      } else {
        std::vector<index_t> order(scores.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](index_t x, index_t y) { return scores[std::size_t(x)] > scores[std::size_t(y)]; });
        for (index_t i = 0; i < room; ++i) kept.insert(n < length[h] - tail || whole ? i : order[std::size_t(i)]);
      }
      for (index_t i = 0; i < newest; ++i) kept.insert(length[h] - 1 - i);
      rows.emplace_back(kept.begin(), kept.end());
    }
  }
  return rows;
}

}  // namespace support
