// What paged retrieval should score, in double and slot by slot: no index, no tiles, no running softmax.
#pragma once

#include "oracle.hpp"

namespace support::oracle {

enum class estimate { hsa, quest, sparq };

/// How an estimate reads keys.
struct page_rules {
  estimate kind;
  index_t page = 1;
  index_t channels = 1;
};

struct page_scores {
  std::vector<double> scores;                      // by slot; -infinite where no row sees it
  std::vector<std::vector<double>> probabilities;  // by row and slot, where the estimate has them
  bool ambiguous = false;                          // fp32 may choose another channel or side
  double slack = 0;                                // what fp32 may be off by, beside a part of the score
};

/// `queries` are the rows of one group with their positions and query heads; `keys` what is stored, with positions.
inline page_scores score_pages(const page_rules& rules, const std::vector<const float*>& queries,
                               const std::vector<index_t>& query_positions, const std::vector<index_t>& q_heads,
                               const std::vector<const float*>& keys, const std::vector<index_t>& positions, int dim,
                               const tessera::logit_rule& rule = {}) {
  const std::size_t n = keys.size(), rows = queries.size();
  page_scores result;
  result.scores.assign(n, -infinite);
  std::vector<double> weight(std::size_t(dim), 0.0), total(std::size_t(dim), 0.0);
  const auto usable = [&](std::size_t r) {
    return std::all_of(queries[r], queries[r] + dim, [](float x) { return std::isfinite(x); });
  };
  for (std::size_t r = 0; r < rows; ++r) {
    for (int d = 0; d < dim && usable(r); ++d) {
      weight[std::size_t(d)] += std::abs(double(queries[r][d]));
      total[std::size_t(d)] += double(queries[r][d]);
    }
  }
  auto order = preference(weight);
  const std::size_t taken = rules.kind == estimate::quest ? std::size_t(dim) : std::size_t(rules.channels);
  if (taken < order.size()) {
    const double in = weight[std::size_t(order[taken - 1])], out = weight[std::size_t(order[taken])];
    result.ambiguous |= in != out && in - out < 1e-5 * in;
  }
  order.resize(taken);
  if (rules.kind == estimate::hsa && rules.page > 1) {
    for (const index_t d : order) {
      const double sum = total[std::size_t(d)];
      result.ambiguous |= sum != 0 && std::abs(sum) < 1e-5 * weight[std::size_t(d)];
    }
  }
  const std::size_t page = std::size_t(rules.page);
  std::vector<double> lower, upper;  // [pages, taken] of what is finite, NaN where nothing is; pages of one: the key
  for (std::size_t first = 0; first < n; first += page) {
    for (const index_t d : order) {
      double least = std::nan(""), most = std::nan("");
      for (std::size_t at = first; at < std::min(n, first + page); ++at) {
        const double value = double(keys[at][d]);
        if (page > 1 && !std::isfinite(value)) continue;
        least = std::isnan(least) ? value : std::min(least, value);
        most = std::isnan(most) ? value : std::max(most, value);
      }
      lower.push_back(least);
      upper.push_back(most);
    }
  }
  const auto visible = [&](std::size_t r, std::size_t slot) {
    const index_t ago = query_positions[r] - positions[slot];
    return ago >= 0 && (rule.sliding_window <= 0 || ago < rule.sliding_window);
  };
  for (std::size_t r = 0; r < rows; ++r) {
    result.probabilities.emplace_back(n, 0.0);
    for (std::size_t slot = 0; slot < n; ++slot) {
      if (visible(r, slot) && result.scores[slot] == -infinite) result.scores[slot] = 0;
    }
    if (!usable(r)) continue;
    double chosen = 0, whole = 0;
    for (int d = 0; d < dim; ++d) whole += std::abs(double(queries[r][d]));
    for (const index_t d : order) chosen += std::abs(double(queries[r][d]));
    const double plain = rule.scale != 0 ? double(rule.scale) : 1 / std::sqrt(double(dim));
    const double scale = rules.kind == estimate::quest ? 1 : chosen == 0 ? 0 : plain / std::sqrt(chosen / whole);
    std::vector<double> logits;
    for (std::size_t slot = 0; slot < n; ++slot) {
      if (slot % page != 0) {  // all slots of a page have its logit
        logits.push_back(logits.back());
        continue;
      }
      double dot = 0, size = 0;
      for (std::size_t i = 0; i < taken; ++i) {
        const index_t d = order[i];
        const bool up = (rules.kind == estimate::quest ? double(queries[r][d]) : total[std::size_t(d)]) > 0;
        const double one = (up ? upper : lower)[slot / page * taken + i];
        dot += double(queries[r][d]) * one;
        size += std::abs(double(queries[r][d]) * one);
      }
      double logit = dot * scale;
      if (rule.soft_cap > 0 && rules.kind != estimate::quest)
        logit = double(rule.soft_cap) * std::tanh(logit / double(rule.soft_cap));
      logits.push_back(logit < infinite ? logit : std::nan(""));
      if (rules.kind == estimate::quest && std::isfinite(size)) result.slack = std::max(result.slack, 1e-6 * size);
    }
    if (rules.kind == estimate::quest) {
      bool speaks = false;
      for (std::size_t slot = 0; slot < n; ++slot) speaks |= visible(r, slot) && logits[slot] > -infinite;
      for (std::size_t slot = 0; slot < n && speaks; ++slot) {
        if (visible(r, slot)) result.scores[slot] += logits[slot];
      }
      continue;
    }
    double top = -infinite;
    for (std::size_t slot = 0; slot < n; ++slot) {
      if (visible(r, slot) && logits[slot] > top) top = logits[slot];
    }
    if (top == -infinite) continue;
    const double sink = rule.sink_logits ? double(rule.sink_logits[q_heads[r]]) : -infinite;
    top = std::max(top, sink);
    double sum = sink == -infinite ? 0 : std::exp(sink - top);
    for (std::size_t slot = 0; slot < n; ++slot) {
      if (visible(r, slot) && !std::isnan(logits[slot])) sum += std::exp(logits[slot] - top);
    }
    for (std::size_t slot = 0; slot < n; ++slot) {
      if (!visible(r, slot)) continue;
      const double p = std::exp(logits[slot] - top) / sum;
      result.probabilities.back()[slot] = std::isnan(p) ? 0 : p;
      result.scores[slot] += p;
    }
  }
  return result;
}

/// How a choice stands to the oracle's: the same, other slots whose scores fp32 cannot tell apart, or neither.
enum class agreement { same, rounding, wrong };

/// `unit` is the page where whole pages are chosen, else 1. Exactly equal scores are a tie, which rounding does not
/// excuse: the earlier one has to win.
inline agreement compare_choices(const page_scores& expected, const std::vector<index_t>& want,
                                 const std::vector<index_t>& got, index_t unit) {
  if (got == want) return agreement::same;
  if (expected.ambiguous) return agreement::rounding;
  const auto score_of = [&](index_t slot) {
    double best = -infinite;
    const index_t first = slot / unit * unit, end = std::min(first + unit, index_t(expected.scores.size()));
    for (index_t at = first; at < end; ++at) best = std::max(best, ranked(expected.scores[std::size_t(at)]));
    return best;
  };
  std::vector<index_t> lost, won;
  std::set_difference(want.begin(), want.end(), got.begin(), got.end(), std::back_inserter(lost));
  std::set_difference(got.begin(), got.end(), want.begin(), want.end(), std::back_inserter(won));
  double best = -infinite, worst = infinite;
  for (const index_t slot : lost) best = std::max(best, score_of(slot));
  for (const index_t slot : won) worst = std::min(worst, score_of(slot));
  const double room = 1e-4 * std::max(std::abs(best), std::abs(worst)) + expected.slack;
  return best > worst && best - worst <= room ? agreement::rounding : agreement::wrong;
}

/// Whole pages, ceil(keep / page) of them: those with some of the newest `tail` slots, then the best by their best slot.
template <class Score>
std::vector<index_t> top_pages(const std::vector<Score>& scores, index_t tail, index_t keep, index_t page) {
  const index_t n = index_t(scores.size());
  if (n == 0 || keep <= 0) return {};
  std::vector<double> best;
  std::vector<bool> chosen;
  for (index_t slot = 0; slot < n; ++slot) {
    if (slot % page == 0) {
      best.push_back(-infinite);
      chosen.push_back(false);
    }
    best.back() = std::max(best.back(), ranked(double(scores[std::size_t(slot)])));
    if (slot >= n - tail) chosen.back() = true;
  }
  index_t room =
      index_t(std::ceil(double(keep) / double(page))) - index_t(std::count(chosen.begin(), chosen.end(), true));
  for (const index_t p : preference(best)) {
    if (room > 0 && !chosen[std::size_t(p)]) {
      chosen[std::size_t(p)] = true;
      --room;
    }
  }
  std::vector<index_t> slots;
  for (index_t slot = 0; slot < n; ++slot) {
    if (chosen[std::size_t(slot / page)]) slots.push_back(slot);
  }
  return slots;
}

}  // namespace support::oracle
