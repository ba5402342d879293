// How far a conversation has come in one layer.
#pragma once

#include <limits>
#include <string>

#include "../error.hpp"
#include "../stored/segment_cursor.hpp"

TESSERA_NAMESPACE_BEGIN

/// Where a conversation stands in one layer: its next position, and how much of the turn's prompt has come.
struct layer_progress {
  index_t next_position = 0;
  index_t turn_tokens = 0;  ///< prompt tokens since the turn began; 0 while decoding
  segment_cursor text{};    ///< where its segments stand, if the recipe needs them
  index_t judged = 0;       ///< of the turn's prompt tokens, those among which a chunk's end has chosen
  index_t again = 0;        ///< the newest of them, which the next choice judges again
  bool ended = false;       ///< `end_layer` has been called since the turn began

  /// Errors   so many more tokens would have positions beyond 32 bits, the one behind them included.
  void require_positions(index_t tokens) const {
    constexpr index_t most = (std::numeric_limits<index_t>::max)();
    if (tokens <= most - next_position) return;
    fail("tokens of a sequence", offset_t(next_position) + tokens, "at most " + std::to_string(most),
         "close the sequence and open another one");
  }
};

TESSERA_NAMESPACE_END
