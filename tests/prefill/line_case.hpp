// Lines chosen by the library and by a greedy in double, and what they are compared by.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include <tessera/core/prompt/prompt_lines.hpp>
#include <tessera/core/prompt/sampled_attention.hpp>
#include <tessera/math/line_cover.hpp>

#include "support/random.hpp"

namespace support {

/// The attention of a few rows of a chunk over what a head stores, in double, and the same in float for the library.
struct sampled_rows {
  index_t first, next;
  std::vector<index_t> rows, positions;
  std::vector<double> weights;  // [rows, slots]
  std::vector<float> floats{};
  std::vector<index_t> slot_at{}, stored_before{};

  std::size_t at(std::size_t r, std::size_t slot) const { return r * positions.size() + slot; }

  tessera::sampled_attention view() {
    floats.assign(weights.begin(), weights.end());
    slot_at.assign(std::size_t(next), tessera::no_index);
    for (std::size_t slot = 0; slot < positions.size(); ++slot) slot_at[std::size_t(positions[slot])] = index_t(slot);
    stored_before.assign(1, 0);
    for (const index_t slot : slot_at) stored_before.push_back(stored_before.back() + (slot != tessera::no_index));
    return {first, next, rows, positions, slot_at, stored_before, floats.data()};
  }

  double total() const {
    double sum = 0;
    for (const double weight : weights) sum += weight;
    return sum;
  }
  bool on_line(const tessera::line_set& lines, std::size_t r, std::size_t slot) const {
    return std::binary_search(lines.vertical.begin(), lines.vertical.end(), positions[slot]) ||
           std::binary_search(lines.slash.begin(), lines.slash.end(), rows[r] - positions[slot]);
  }
  double covered(const tessera::line_set& lines) const {
    double sum = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t slot = 0; slot < positions.size(); ++slot) {
        if (on_line(lines, r, slot)) sum += weights[at(r, slot)];
      }
    }
    return sum;
  }
  /// Stored keys on a line in the whole chunk, counted one by one.
  index_t vertical_length(index_t position) const { return next - std::max(first, position); }
  index_t slash_length(index_t distance) const {
    index_t count = 0;
    for (const index_t position : positions) count += position + distance >= first && position + distance < next;
    return count;
  }
  tessera::offset_t length(const tessera::line_set& lines) const {
    tessera::offset_t sum = 0;
    for (const index_t position : lines.vertical) sum += vertical_length(position);
    for (const index_t distance : lines.slash) sum += slash_length(distance);
    return sum;
  }
};

/// The forced lines, then always the line with most uncovered weight for its length: every line's uncovered weight is kept up
/// to date entry by entry, and the best is looked for among all of them.
inline tessera::line_set greedy_lines(const sampled_rows& seen, double alpha, index_t slashes, index_t columns) {
  const std::size_t slots = seen.positions.size(), lines = std::size_t(seen.next) + slots;
  std::vector<double> gain(lines, 0.0), left = seen.weights;
  std::vector<index_t> length(lines, 0);
  std::vector<bool> taken(lines, false);
  double covered = 0;
  const auto slash_of = [&](std::size_t r, std::size_t slot) {
    return std::size_t(seen.rows[r] - seen.positions[slot]);
  };
  for (std::size_t r = 0; r < seen.rows.size(); ++r) {
    for (std::size_t slot = 0; slot < slots; ++slot) {
      if (seen.positions[slot] > seen.rows[r]) continue;
      gain[slash_of(r, slot)] += left[seen.at(r, slot)];
      gain[std::size_t(seen.next) + slot] += left[seen.at(r, slot)];
    }
  }
  for (std::size_t line = 0; line < lines; ++line) {
    length[line] = line < std::size_t(seen.next) ? seen.slash_length(index_t(line))
                                                 : seen.vertical_length(seen.positions[line - std::size_t(seen.next)]);
  }
  const auto take = [&](std::size_t line) {
    taken[line] = true;
    for (std::size_t r = 0; r < seen.rows.size(); ++r) {
      for (std::size_t slot = 0; slot < slots; ++slot) {
        if (seen.positions[slot] > seen.rows[r]) continue;
        const std::size_t vertical = std::size_t(seen.next) + slot, slash = slash_of(r, slot);
        if (line != vertical && line != slash) continue;
        double& weight = left[seen.at(r, slot)];
        gain[vertical] -= weight;
        gain[slash] -= weight;
        covered += weight;
        weight = 0;
      }
    }
  };
  for (std::size_t line = 0; line < lines; ++line) {
    const bool forced = line < std::size_t(seen.next) ? index_t(line) < slashes
                                                      : seen.positions[line - std::size_t(seen.next)] < columns;
    if (forced && length[line] > 0) take(line);
  }
  const double total = seen.total();
  while (covered < alpha * total) {
    std::size_t best = lines;
    for (std::size_t line = 0; line < lines; ++line) {
      if (taken[line] || length[line] == 0 || gain[line] < 1e-12) continue;
      if (best == lines || gain[line] / length[line] > gain[best] / length[best]) best = line;
    }
    if (best == lines) break;
    take(best);
  }
  tessera::line_set result;
  for (std::size_t line = 0; line < lines; ++line) {
    if (!taken[line]) continue;
    if (line < std::size_t(seen.next)) {
      result.slash.push_back(index_t(line));
    } else {
      result.vertical.push_back(seen.positions[line - std::size_t(seen.next)]);
    }
  }
  return result;
}

/// Attention of random rows of a random chunk: peaked, flat or tied logits, with sinks, a diagonal band, columns and stripes
/// that stand out; over a whole history or over what an eviction left of it.
inline sampled_rows random_sampled_rows(rng& random, index_t max_tokens) {
  sampled_rows seen;
  seen.next = random.chance(0.2) ? random.between(1, 70) : random.between(1, max_tokens);
  const index_t fresh = random.chance(0.3) ? seen.next : random.chance(0.1) ? 1 : random.between(1, seen.next);
  seen.first = seen.next - fresh;
  const double keeps = random.chance(0.6) ? 1 : random.uniform();
  for (index_t at = 0; at < seen.next; ++at) {
    if (at >= seen.first || random.uniform() < keeps) seen.positions.push_back(at);
  }
  for (index_t at = seen.first; at < seen.next; ++at) {
    if (random.chance(std::min(1.0, 8.0 / fresh)) || at + 1 == seen.next) seen.rows.push_back(at);
  }
  const double sharp = random.pick({0.0, 0.5, 2.0, 6.0}), band = random.pick({0.0, 4.0}),
               sink = random.pick({0.0, 6.0});
  const index_t width = random.between(1, 30), levels = random.chance(0.3) ? random.between(1, 3) : 0;
  std::set<index_t> columns, stripes;
  for (index_t i = random.between(0, 6); i > 0; --i) columns.insert(random.between(0, seen.next - 1));
  for (index_t i = random.between(0, 6); i > 0; --i) stripes.insert(random.between(0, seen.next - 1));
  for (const index_t row : seen.rows) {
    std::vector<double> logits;
    double top = -1e9, sum = 0;
    for (const index_t at : seen.positions) {
      double logit = sharp * (levels ? double(random.between(0, levels - 1)) : double(random.normal()));
      logit += (row - at < width ? band : 0) + (at < 2 ? sink : 0);
      logit += (columns.count(at) > 0 ? 5 : 0) + (stripes.count(row - at) > 0 ? 5 : 0);
      logits.push_back(at <= row ? logit : -1e300);
      top = std::max(top, logits.back());
    }
    for (double& logit : logits) sum += logit = logit == -1e300 ? 0 : std::exp(logit - top);
    for (const double weight : logits) seen.weights.push_back(weight / sum);
  }
  return seen;
}

}  // namespace support
