// A chunk of a turn's prompt, as a cache's backend gets it.
#pragma once

#include "../../core/stored/segment_cursor.hpp"
#include "../../core/types.hpp"

TESSERA_NAMESPACE_BEGIN

/// A chunk of a prompt, for one layer of one sequence.
struct prompt_chunk {
  index_t first = 0;      ///< position of its first token
  bool begins = false;    ///< whether it is the turn's first one in this layer
  segment_marks marks{};  ///< segments of its tokens
};

TESSERA_NAMESPACE_END
