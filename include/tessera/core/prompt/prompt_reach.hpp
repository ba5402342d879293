// How far a turn's prompt has come, and which of its tokens have been chosen already.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Three positions of one sequence, ascending. What lies before `open` has been chosen and stays; the rest competes.
struct prompt_reach {
  index_t begin = 0;  ///< of the turn's first prompt token
  index_t open = 0;   ///< of the first token that competes: the turn's first one, or one of the last chunk's window
  index_t end = 0;    ///< of the next token

  TESSERA_HD index_t seen() const { return end - begin; }
};

TESSERA_NAMESPACE_END
