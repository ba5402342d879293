// The part of a prompt that a text is read again for.
#pragma once

#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Tokens [first, end) of what a layer stores, by position, and the position of the re-reading's first token.
struct reread_part {
  index_t first = 0, end = 0;
  index_t begin = 0;
};

TESSERA_NAMESPACE_END
