// The part of a prompt that a rereading scores.
#pragma once

#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Stored tokens [first, end) of a layer, by position, and the position of the rereading's first token.
struct reread_part {
  index_t first = 0, end = 0;
  index_t begin = 0;
};

TESSERA_NAMESPACE_END
