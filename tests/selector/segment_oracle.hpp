// SABlock in double, straight from its formulas: whole sorts, materialised statistics, no running anything.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "support/oracle.hpp"

namespace support::oracle {

struct sablock_settings {
  index_t pool = 7, largest = 9;
  double alpha = 0.5, lambda = 0.5, strength = 4, coverage = 0.9;
  bool balance = false;
};

/// What one segment keeps of its tokens, and in blocks of what size.
struct segment_choice {
  std::vector<index_t> places;
  index_t size = 0;
};

/// The candidate sizes: `largest`, then the odd ones below it, as far as they fit.
inline std::vector<index_t> block_sizes(index_t largest, index_t n, index_t keep) {
  std::vector<index_t> sizes;
  for (index_t size = largest; size >= 1; --size) {
    if ((size == largest || size % 2 == 1) && size <= std::min(n, keep)) sizes.push_back(size);
  }
  return sizes;
}

inline double sum_of(const std::vector<double>& scores, const std::vector<index_t>& places) {
  double sum = 0;
  for (const index_t i : places) sum += std::isfinite(scores[std::size_t(i)]) ? scores[std::size_t(i)] : 0;
  return sum;
}

inline segment_choice choose_in_segment(const std::vector<double>& scores, index_t keep, double coverage,
                                        index_t largest) {
  const double best = sum_of(scores, top_k(scores, keep));
  for (const index_t size : block_sizes(largest, index_t(scores.size()), keep)) {
    segment_choice made{top_blocks(scores, 0, keep, size), size};
    if (sum_of(scores, made.places) >= coverage * best) return made;
  }
  return {top_k(scores, keep), 1};
}

/// The number, off by rounding: alike for equal numbers. A choice that changes under it hangs on rounding.
inline double jolt(double score, int seed) {
  if (seed == 0) return score;
  std::uint64_t bits = 0;
  static_assert(sizeof bits == sizeof score);
  std::memcpy(&bits, &score, sizeof bits);
  bits = (bits ^ std::uint64_t(seed) * 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 29)) * 0x94d049bb133111ebu;
  return score * (1 + 2e-5 * (double(bits >> 11) * 0x1p-53 - 0.5));
}

/// The candidates' scores before selection, of raw ones: pooled, then raised by their segments. With a seed, scores and
/// weights are off by rounding.
inline std::vector<double> raised_scores(std::vector<double> raw, const std::vector<index_t>& segments,
                                         const sablock_settings& chosen, int seed = 0) {
  for (double& score : raw) score = jolt(score, seed);
  auto scores = max_pool(raw, chosen.pool);
  std::map<index_t, std::vector<std::size_t>> members;
  for (std::size_t i = 0; i < scores.size(); ++i) members[segments[i]].push_back(i);
  std::map<index_t, double> importance, diversity;
  double most = 0;
  for (const auto& [segment, slots] : members) {
    double sum = 0, entropy = 0;
    for (const std::size_t i : slots) sum += std::isfinite(scores[i]) ? scores[i] : 0;
    for (const std::size_t i : slots) {
      const double p = (std::isfinite(scores[i]) ? scores[i] : 0) / (sum + 1e-6);
      entropy -= p * std::log(p + 1e-6);
    }
    importance[segment] = sum / double(slots.size());
    diversity[segment] = slots.size() > 1 && sum > 0 ? entropy / std::log(double(slots.size())) : 0;
    most = std::max(most, importance[segment]);
  }
  for (const auto& [segment, slots] : members) {
    const double mu = most > 0 ? importance[segment] / most : 0, spread = diversity[segment];
    double weight = chosen.balance ? (1 - chosen.alpha) * mu + chosen.alpha * spread
                                   : mu * (1 + chosen.alpha * spread) / (1 + chosen.alpha);
    weight += jolt(1 + mu + 3 * spread, seed) - (1 + mu + 3 * spread);
    for (const std::size_t i : slots) scores[i] *= 1 + chosen.strength * chosen.lambda * weight;
  }
  return scores;
}

struct sablock_choice {
  std::vector<index_t> slots;
  std::vector<index_t> sizes;  // by segment, 0: dropped
};

/// Of scores that were raised: the slots before a tail that are kept, `keep` of them.
inline sablock_choice choose_segments(const std::vector<double>& scores, const std::vector<index_t>& segments,
                                      index_t keep, const sablock_settings& chosen) {
  sablock_choice result;
  const auto best = top_k(scores, keep);
  for (std::size_t first = 0; first < scores.size();) {
    std::size_t end = first;
    while (end < scores.size() && segments[end] == segments[first]) ++end;
    const auto won = std::count_if(best.begin(), best.end(),
                                   [&](index_t slot) { return std::size_t(slot) >= first && std::size_t(slot) < end; });
    result.sizes.push_back(0);
    if (won > 0) {
      const std::vector<double> own(scores.begin() + std::ptrdiff_t(first), scores.begin() + std::ptrdiff_t(end));
      const auto made = choose_in_segment(own, index_t(won), chosen.coverage, chosen.largest);
      result.sizes.back() = made.size;
      for (const index_t place : made.places) result.slots.push_back(index_t(first) + place);
    }
    first = end;
  }
  return result;
}

}  // namespace support::oracle
