// The limits by which searches of packing strategies choose a wanted one, found on a model's own rows.
#pragma once

#include <string>
#include <tessera/runtime/strategy.hpp>
#include <vector>

namespace tool {

/// A limit, and how many of the segments choose what is wanted by it.
struct found_limit {
  double value = 0;
  std::size_t segments = 0;
};

/// What many segments lose by every candidate, and how their keys differ within blocks.
class measured_segments {
 public:
  void add(const tessera::strategy_measures& segment) { all_.push_back(segment); }
  std::size_t count() const { return all_.size(); }
  const std::vector<tessera::strategy_measures>& all() const { return all_; }

  /// The channel_loss by which most segments choose `share` of the channels in groups of `group`: in the middle of the
  /// range of such limits.   Errors   no candidate: tessera::error.
  found_limit channel_loss(float share, tessera::index_t group) const;
  /// The block_spread by which most segments choose `block`.
  found_limit block_spread(tessera::index_t block) const;

 private:
  std::vector<tessera::strategy_measures> all_;
};

}  // namespace tool
