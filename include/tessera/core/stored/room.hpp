// How many free rows are reserved behind stored tokens when they move, and when unused memory is given back.
#pragma once

#include <algorithm>

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Tokens that fit behind `held` stored ones when they move: a step then copies few rows on average, far fewer than it
/// reads, and what is free stays small beside what is held. Both backends keep to it.
inline index_t spare_room(index_t held) { return (std::max<index_t>)(16, held / 64); }

/// The most tokens that a sliding layer with such a window stores between two calls: it drops what it has left behind
/// once that is more than `spare_room`.
inline offset_t longest_slid(index_t window) { return offset_t(window) + spare_room(window); }

/// Whether memory for `capacity` tokens of which `used` stay is worth giving back: once a quarter of it is unused. What
/// is spare after an eviction is then at most a third of what stays.
inline bool gives_back(offset_t used, offset_t capacity) { return used * 4 < capacity * 3; }

TESSERA_NAMESPACE_END
