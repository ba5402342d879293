#include "strategy_limits.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>

namespace tool {
namespace {

/// Limits above `above` and at most `at_most` choose what is wanted.
struct limit_range {
  double above, at_most;
};

/// The middle of the widest range that most of these ranges have in common.
found_limit common_limit(const std::vector<limit_range>& ranges) {
  std::vector<double> ends;
  for (const limit_range& one : ranges) {
    if (one.above < one.at_most) ends.insert(ends.end(), {one.above, one.at_most});
  }
  std::sort(ends.begin(), ends.end());
  found_limit best;
  double widest = 0;
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    const double middle = (ends[i] + ends[i + 1]) / 2, width = ends[i + 1] - ends[i];
    const auto inside = std::size_t(std::count_if(ranges.begin(), ranges.end(), [&](const limit_range& one) {
      return one.above < middle && middle <= one.at_most;
    }));
    if (width <= 0 || inside < best.segments || (inside == best.segments && width <= widest)) continue;
    best = {middle, inside}, widest = width;
  }
  return best;
}

template <class List, class Value>
std::size_t place_of(const List& list, Value wanted, const char* name, const std::string& given,
                     const std::string& allowed) {
  const auto found = std::find(list.begin(), list.end(), wanted);
  tessera::require(found != list.end(), name, given, allowed, "pass one that a search may choose");
  return std::size_t(found - list.begin());
}

}  // namespace

found_limit measured_segments::channel_loss(float share, tessera::index_t group) const {
  const auto& shares = tessera::strategy_shares;
  const auto& groups = tessera::strategy_groups;
  const std::size_t s = place_of(shares, share, "--channels", std::to_string(share), "0.125, 0.25 or 0.375");
  const std::size_t g = place_of(groups, group, "--group", std::to_string(group), "1, 2 or 4");
  std::vector<limit_range> ranges;
  for (const auto& segment : all_) {
    double earlier = 1;  // a share of energy
    // The last candidate is what is left where none qualifies.
    const bool last = s + 1 == shares.size() && g + 1 == groups.size();
    for (std::size_t i = 0; i < s * groups.size() + g; ++i)
      earlier = std::min(earlier, segment.losses[i / groups.size()][i % groups.size()]);
    ranges.push_back({last ? 0 : segment.losses[s][g], earlier});
  }
  return common_limit(ranges);
}

found_limit measured_segments::block_spread(tessera::index_t block) const {
  const auto& blocks = tessera::strategy_blocks;
  const std::size_t wanted = place_of(blocks, block, "--block", std::to_string(block), "4, 8 or 16");
  std::vector<limit_range> ranges;
  for (const auto& segment : all_) {
    if (!(segment.outside > 0)) continue;
    double larger = 1;
    for (std::size_t b = 0; b < wanted; ++b) larger = std::min(larger, segment.inside[b] / segment.outside);
    // The smallest is what is left where none qualifies.
    const bool smallest = wanted + 1 == blocks.size();
    ranges.push_back({smallest ? 0 : segment.inside[wanted] / segment.outside, larger});
  }
  return common_limit(ranges);
}

}  // namespace tool
