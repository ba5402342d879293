// How a segment is packed: what a search may choose, and a report of the searches of a sequence.
#pragma once

#include <array>
#include <string>

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// What all kv_heads of one layer's segment have in common.
struct segment_strategy {
  float channels = 0.25f;  ///< share of a vector's elements that stay
  index_t group = 1;       ///< neighbouring channels that stay together
  index_t block = 8;       ///< tokens of a mean key

  bool operator==(const segment_strategy&) const = default;
};

/// What a search may choose, in the order in which it prefers them.
inline constexpr std::array<float, 3> strategy_shares{0.125f, 0.25f, 0.375f};
/// Channels of a group, in the order in which a search prefers them.
inline constexpr std::array<index_t, 3> strategy_groups{4, 2, 1};
/// Tokens of a block, in the order in which a search prefers them.
inline constexpr std::array<index_t, 3> strategy_blocks{16, 8, 4};

/// How the ended segments of decoded tokens of a sequence are packed.
struct strategy_report {
  index_t searched = 0;    ///< packed by a strategy of their own
  index_t unchanged = 0;   ///< still packed by the strategy of the segment before them
  bool searching = false;  ///< a search is at work
  std::string problem;     ///< why the last search failed; empty where none did
};

TESSERA_NAMESPACE_END
