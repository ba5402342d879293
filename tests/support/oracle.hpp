// Reference answers in double, straight from the definitions: materialised softmax rows, stable sorts, plain loops.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <tessera/core/logit_rule.hpp>

namespace support::oracle {

using tessera::index_t;
inline constexpr double infinite = std::numeric_limits<double>::infinity();

/// One row of the attention matrix and what it makes of the values.
struct attended {
  std::vector<double> probabilities;
  std::vector<double> out;
  double lse = -infinite;
};

/// A query against keys, each with its logical position. `values` may be empty: then there is no output.
inline attended attend(const float* query, index_t query_position, const std::vector<const float*>& keys,
                       const std::vector<const float*>& values, const std::vector<index_t>& positions, int k_dim,
                       int v_dim, const tessera::logit_rule& rule = {}, index_t q_head = 0) {
  const double scale = rule.scale != 0 ? double(rule.scale) : 1 / std::sqrt(double(k_dim));
  std::vector<double> logits;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    double dot = 0;
    for (int d = 0; d < k_dim; ++d) dot += double(query[d]) * double(keys[i][d]);
    double logit = dot * scale;
    if (rule.soft_cap > 0) logit = double(rule.soft_cap) * std::tanh(logit / double(rule.soft_cap));
    const bool future = positions[i] > query_position;
    const bool too_old = rule.sliding_window > 0 && query_position - positions[i] >= rule.sliding_window;
    logits.push_back(future || too_old ? -infinite : logit);
  }
  double top = rule.sink_logits ? double(rule.sink_logits[q_head]) : -infinite;
  for (const double logit : logits) top = std::max(top, logit);
  attended result;
  result.out.assign(std::size_t(v_dim), 0.0);
  result.probabilities.assign(keys.size(), 0.0);
  double total = rule.sink_logits ? std::exp(double(rule.sink_logits[q_head]) - top) : 0.0;
  for (const double logit : logits) total += logit == -infinite ? 0.0 : std::exp(logit - top);
  if (total == 0) return result;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (logits[i] == -infinite) continue;
    const double p = std::exp(logits[i] - top) / total;
    result.probabilities[i] = p;
    for (int d = 0; d < v_dim && !values.empty(); ++d) result.out[std::size_t(d)] += p * double(values[i][d]);
  }
  result.lse = top + std::log(total);
  return result;
}

inline double ranked(double score) { return std::isnan(score) ? -infinite : score; }

/// Indices [0, n) in order of preference: score descending, NaN as -infinity, ties to the lower index.
template <class Score>
std::vector<index_t> preference(const std::vector<Score>& scores) {
  std::vector<index_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](index_t a, index_t b) {
    return ranked(double(scores[std::size_t(a)])) > ranked(double(scores[std::size_t(b)]));
  });
  return order;
}

template <class Score>
std::vector<index_t> top_k(const std::vector<Score>& scores, index_t k) {
  auto order = preference(scores);
  order.resize(std::size_t(std::clamp<index_t>(k, 0, index_t(scores.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

/// The newest `tail` slots and the best others.
template <class Score>
std::vector<index_t> top_tokens(const std::vector<Score>& scores, index_t tail, index_t keep) {
  const index_t n = index_t(scores.size());
  keep = std::clamp<index_t>(keep, 0, n);
  tail = std::clamp<index_t>(tail, 0, keep);
  auto chosen = top_k(std::vector<Score>(scores.begin(), scores.end() - tail), keep - tail);
  for (index_t slot = n - tail; slot < n; ++slot) chosen.push_back(slot);
  return chosen;
}

/// The newest `tail` slots and the best blocks, the last one taken trimmed to its best tokens.
template <class Score>
std::vector<index_t> top_blocks(const std::vector<Score>& scores, index_t tail, index_t keep, index_t block) {
  const index_t n = index_t(scores.size());
  keep = std::clamp<index_t>(keep, 0, n);
  tail = std::clamp<index_t>(tail, 0, keep);
  std::vector<double> sums;
  std::vector<std::vector<index_t>> members;
  for (index_t slot = 0; slot < n - tail; ++slot) {
    if (slot % block == 0) {
      sums.push_back(-infinite);
      members.emplace_back();
    }
    members.back().push_back(slot);
    const double score = ranked(double(scores[std::size_t(slot)]));
    if (score > -infinite) sums.back() = (sums.back() == -infinite ? 0 : sums.back()) + score;
  }
  std::vector<index_t> chosen;
  for (const index_t b : preference(sums)) {
    std::vector<Score> inside;
    for (const index_t slot : members[std::size_t(b)]) inside.push_back(scores[std::size_t(slot)]);
    for (const index_t i : top_k(inside, keep - tail - index_t(chosen.size()))) {
      chosen.push_back(members[std::size_t(b)][std::size_t(i)]);
    }
  }
  std::sort(chosen.begin(), chosen.end());
  for (index_t slot = n - tail; slot < n; ++slot) chosen.push_back(slot);
  return chosen;
}

/// The largest neighbour; NaN neighbours do not count, a NaN score becomes -infinity.
template <class Score>
std::vector<Score> max_pool(const std::vector<Score>& in, index_t kernel) {
  std::vector<Score> out;
  for (index_t i = 0; i < index_t(in.size()); ++i) {
    Score best = -std::numeric_limits<Score>::infinity();
    for (index_t j = i - kernel / 2; j <= i + kernel / 2; ++j) {
      if (j >= 0 && j < index_t(in.size()) && in[std::size_t(j)] > best) best = in[std::size_t(j)];
    }
    out.push_back(std::isnan(in[std::size_t(i)]) ? -std::numeric_limits<Score>::infinity() : best);
  }
  return out;
}

/// The mean over `kernel` places, zeros beyond the ends and for what is not finite.
template <class Score>
std::vector<double> average_pool(const std::vector<Score>& in, index_t kernel) {
  std::vector<double> out;
  for (index_t i = 0; i < index_t(in.size()); ++i) {
    double sum = 0;
    for (index_t j = i - kernel / 2; j <= i + kernel / 2; ++j) {
      if (j >= 0 && j < index_t(in.size()) && std::isfinite(in[std::size_t(j)])) sum += double(in[std::size_t(j)]);
    }
    out.push_back(std::isfinite(in[std::size_t(i)]) ? sum / double(kernel) : -infinite);
  }
  return out;
}

/// PyramidKV's count of a head, as its reference code branches.
inline index_t pyramid_count(index_t layer, index_t layers, index_t budget, index_t beta, index_t tail, index_t n) {
  const index_t base = std::max(0, budget - tail);
  if (layers == 1 || n < 2 * base) return std::min(n, tail + base);
  index_t least = base / beta, most = 2 * base - least;
  if (most >= n - tail) {
    most = n - tail;
    least = 2 * base - most;
  }
  const index_t step = (most - least) / (layers - 1);
  return std::min(n, tail + most - layer * step);
}

/// num / den rounded to nearest, halves to even; both not negative.
inline index_t round_half_even(std::int64_t num, std::int64_t den) {
  const std::int64_t floor = num / den, twice = 2 * (num % den);
  return index_t(floor + (twice > den || (twice == den && floor % 2 == 1)));
}

/// Ada-KV's counts by a full sort of all heads' candidates; the floor is given in thousandths.
template <class Score>
std::vector<index_t> adaptive_counts(const std::vector<std::vector<Score>>& candidates,
                                     const std::vector<index_t>& tokens, index_t budget, index_t tail,
                                     index_t floor_thousandths) {
  const index_t heads = index_t(candidates.size()), base = std::max(0, budget - tail);
  std::vector<Score> all;
  std::vector<index_t> owner;
  bool fits = true;
  for (index_t h = 0; h < heads; ++h) {
    fits &= index_t(candidates[std::size_t(h)].size()) <= base;
    for (const Score score : candidates[std::size_t(h)]) {
      all.push_back(score);
      owner.push_back(h);
    }
  }
  if (fits) return tokens;
  std::vector<std::int64_t> won(std::size_t(heads), 0);
  const auto order = preference(all);
  for (std::size_t i = 0; i < order.size() && i < std::size_t(heads * base); ++i)
    ++won[std::size_t(owner[std::size_t(order[i])])];
  std::vector<index_t> counts;
  for (index_t h = 0; h < heads; ++h) {
    const std::int64_t least = std::int64_t(floor_thousandths) * base / 1000;
    const index_t share = round_half_even(won[std::size_t(h)] * (1000 - floor_thousandths) + 1000 * least, 1000);
    counts.push_back(std::min(tokens[std::size_t(h)], tail + share));
  }
  return counts;
}

}  // namespace support::oracle
