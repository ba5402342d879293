// What a cache's backend is told of a chunk of a turn's prompt.
#pragma once

#include "../../core/stored/segment_cursor.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A chunk of a prompt, for one layer of one sequence.
struct prompt_chunk {
  index_t first = 0;       ///< position of its first token
  bool begins = false;     ///< whether it is the turn's first one in this layer
  segment_marks marks{};   ///< where segments of its text end
};

TESSERA_NAMESPACE_END
