// How many tokens of a conversation one layer has stored and judged.
#pragma once

#include <limits>
#include <string>

#include "../error.hpp"
#include "../parameters.hpp"
#include "../stored/segment_cursor.hpp"
#include "prompt_reach.hpp"

TESSERA_NAMESPACE_BEGIN

/// The progress of a conversation in one layer: its next position, and the tokens of the turn's prompt so far.
struct layer_progress {
  index_t next_position = 0;
  index_t turn_tokens = 0;          ///< prompt tokens since the turn began; 0 while decoding
  segment_cursor text{};            ///< the segment of its next token, if the recipe needs segments
  segment_cursor answer_text{};     ///< the same of the first token behind the last turn's prompt
  index_t judged = 0;               ///< prompt tokens of the turn among which the end of a chunk has chosen
  index_t reconsidered_tokens = 0;  ///< the newest of them: the next choice includes them once more
  index_t scored = 0;               ///< the first positions, of whose tokens the engine has set the scores
  bool ended = false;               ///< `end_layer` has been called since the turn began

  /// The tokens of the turn's prompt: those that earlier choices settled, and those that compete.
  prompt_reach reach() const {
    const index_t begin = next_position - turn_tokens;
    return {begin, begin + judged - reconsidered_tokens, next_position};
  }
  /// The end of a chunk has chosen among all tokens so far. The next choice considers the newest `reconsidered` again.
  void end_chunk(index_t reconsidered) {
    reconsidered_tokens = reconsidered;
    judged = turn_tokens;
  }

  /// Errors   positions of `tokens` more, and the one behind them, do not fit 32 bits: tessera::error.
  void require_positions(index_t tokens) const {
    constexpr index_t last = (std::numeric_limits<index_t>::max)();
    if (tokens <= last - next_position) return;
    fail("tokens of a sequence", offset_t(next_position) + tokens, "at most " + std::to_string(last),
         "close the sequence and open another one");
  }
  /// Errors   not `count` tokens from position `first` on, behind tokens with scores: tessera::error.
  void require_scores_fit(index_t first, index_t count) const {
    require(first >= 0 && first <= scored, "first position of scores", first,
            "at most " + std::to_string(scored) + ", behind the tokens that have scores",
            "set the scores of all tokens in order");
    require(count >= 0 && count <= next_position - first, "tokens of scores", count,
            value_range<index_t>{0, next_position - first}.text(), "set the scores of tokens that the layer has had");
  }
  /// Errors   no prompt, or not `count` tokens from position `first` on, that can be read again: tessera::error.
  void require_rereading(index_t first, index_t count) const {
    require(turn_tokens >= 1, "tokens of this turn", turn_tokens, "at least 1", "read a prompt again before it ends");
    require(first >= 0 && count >= 1 && offset_t(first) + count <= next_position, "tokens that are read again",
            std::to_string(count) + " from " + std::to_string(first), "some of " + std::to_string(next_position),
            "pass positions of the prompt");
  }
};

TESSERA_NAMESPACE_END
