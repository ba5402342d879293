// How many tokens of a conversation one layer has stored and judged.
#pragma once

#include <limits>
#include <string>

#include "../error.hpp"
#include "../stored/segment_cursor.hpp"

TESSERA_NAMESPACE_BEGIN

/// The progress of a conversation in one layer: its next position, and the tokens of the turn's prompt so far.
struct layer_progress {
  index_t next_position = 0;
  index_t turn_tokens = 0;          ///< prompt tokens since the turn began; 0 while decoding
  segment_cursor text{};            ///< the segment of its next token, if the recipe needs segments
  index_t judged = 0;               ///< prompt tokens of the turn among which the end of a chunk has chosen
  index_t reconsidered_tokens = 0;  ///< the newest of them: the next choice includes them once more
  bool ended = false;               ///< `end_layer` has been called since the turn began

  /// Errors   positions of `tokens` more, and the one behind them, do not fit 32 bits: tessera::error.
  void require_positions(index_t tokens) const {
    constexpr index_t last = (std::numeric_limits<index_t>::max)();
    if (tokens <= last - next_position) return;
    fail("tokens of a sequence", offset_t(next_position) + tokens, "at most " + std::to_string(last),
         "close the sequence and open another one");
  }
};

TESSERA_NAMESPACE_END
