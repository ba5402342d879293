// Storage and traffic of a method in the convention of RocketKV's Table 1, for comparison with papers.
#pragma once

#include <cmath>

#include "../config.hpp"

TESSERA_NAMESPACE_BEGIN

/// What a method holds, and what a decode step reads, in units of K and V of the uncompressed sequence.
struct normalized_cost {
  double storage = 1;
  double traffic = 1;
};

/// Table 1 counts both extrema of a page against K alone, twice what they are of K and V together, and SparQ's second
/// copy of K as a whole cache. `counted` is what its own traffic column implies.
enum class cost_convention { printed, counted };

/// The costs of Table 1 of RocketKV (arXiv:2502.14051, Sec. 3.6) at a compression ratio c = S / t and a split r.
/// Rounding of pages, room for the answer, positions and candidate lists are left out: `cache::bytes` and
/// `cache::bytes_read` count those too, in bytes. Traffic is 1 / c throughout, half of it for the estimate where there
/// is one.
struct table_one {
  double c = 1;
  cost_convention convention = cost_convention::printed;

  /// SnapKV and whatever else keeps t tokens and reads them.
  normalized_cost eviction() const { return {1 / c, 1 / c}; }
  /// Pages of c tokens.
  normalized_cost quest() const { return {1 + 1 / c, 1 / c}; }
  /// K once more, by channel.
  normalized_cost sparq() const { return {convention == cost_convention::printed ? 2.0 : 1.5, 1 / c}; }
  /// A first stage by c^r, pages of c^((1 - r) / 2) tokens over what is left.
  normalized_cost rocketkv(double r) const { return {1 / std::pow(c, r) + extrema(r), 1 / c}; }
  /// The same pages; everything stays stored.
  normalized_cost rocketkv_mt(double r) const { return {1 + extrema(r), 1 / c}; }
  /// The second stage alone.
  normalized_cost hsa() const { return rocketkv(0); }

 private:
  double extrema(double r) const { return (convention == cost_convention::printed ? 2 : 1) / std::pow(c, (1 + r) / 2); }
};

TESSERA_NAMESPACE_END
