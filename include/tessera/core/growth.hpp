// How memory for tokens grows and shrinks: the same rule on every backend.
#pragma once

#include <algorithm>

#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// How many tokens beyond `held` memory has room for when it grows: a step then copies few rows on average, far fewer than
/// it reads, and what is spare is at most a 64th of what is held, or 16 tokens.
inline index_t spare_room(index_t held) { return std::max<index_t>(16, held / 64); }

/// Whether memory for `capacity` tokens of which `used` stay is worth giving back: once a quarter of it is unused. What is
/// spare after an eviction is then less than a third of what stays.
inline bool gives_back(offset_t used, offset_t capacity) { return used * 4 < capacity * 3; }

TESSERA_NAMESPACE_END
