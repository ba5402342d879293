// How many free rows are reserved behind stored tokens when they move, and when unused memory is released.
#pragma once

#include <algorithm>

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Free rows that are reserved behind `stored` tokens when these move. A step then copies few rows on average, far
/// fewer than it reads, and free memory stays small beside stored rows. Both backends use it.
inline index_t spare_room(index_t stored) { return (std::max<index_t>)(16, stored / 64); }

/// Upper bound of the tokens that a sliding layer stores between two calls. It drops tokens behind its window once they
/// are more than `spare_room`.
inline offset_t longest_slid(index_t window) { return offset_t(window) + spare_room(window); }

/// Whether a memory for `capacity` tokens is worth releasing when `used` of them stay: once a quarter of it is unused.
/// Unused memory after an eviction is then at most a third of the used one.
inline bool gives_back(offset_t used, offset_t capacity) { return used * 4 < capacity * 3; }

TESSERA_NAMESPACE_END
