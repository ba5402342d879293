// Which tokens of a turn's prompt are stored, and which of them still compete.
#pragma once

#include "../config.hpp"
#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Three positions of one sequence, ascending. Tokens before `open` are settled; those from it on compete.
struct prompt_reach {
  index_t begin = 0;  ///< of the turn's first prompt token
  index_t open = 0;   ///< of the first token that competes: the turn's first one, or one of the last chunk's window
  index_t end = 0;    ///< of the next token

  /// Tokens of the turn's prompt so far.
  TESSERA_HD index_t prompt_tokens() const { return end - begin; }
};

TESSERA_NAMESPACE_END
