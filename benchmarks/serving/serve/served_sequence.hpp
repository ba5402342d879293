// A conversation while it is served.
#pragma once

#include <cstddef>
#include <vector>

#include "requests.hpp"
#include "statistics.hpp"

namespace serving {

/// Where a conversation stands. `coming`: its next turn is not there yet; it may have a sequence in the cache. `waiting`: to
/// be admitted. `filling`: its prompt is being written. `answering`: its answer is being decoded.
enum class stage { coming, waiting, filling, answering, done };

template <class Ticket>
struct served_sequence {
  const conversation* request = nullptr;
  std::size_t number = 0;  ///< of the conversation
  stage state = stage::coming;
  double due = 0;  ///< when the turn arrives, or arrived
  bool is_preempted = false;
  std::vector<token_t> text{};  ///< prompts and answers until now; the newest token of an answer is not stored
  std::size_t written = 0;      ///< of these, how many the cache has
  std::size_t prompt_begin = 0, prompt_end = 0;  ///< of the prompt under way, in `text`
  std::size_t filled_from = 0;                   ///< of it, behind what a stored document had
  std::size_t turn = 0;
  index_t answered = 0;  ///< tokens of the turn's answer
  index_t id = -1;       ///< in the cache; -1: not there
  Ticket saved{};
  tessera::offset_t promised = 0;  ///< units that the prompt may still take, when it began
  served_turn times{};

  bool is_running() const { return state == stage::filling || state == stage::answering; }
  bool is_parked() const { return id >= 0 && !is_running(); }
  bool has_cache() const { return id >= 0 || saved != nullptr; }
  /// Whether it goes on with an answer: one token of it is to be stored.
  bool is_within_answer() const { return answered > 0 && text.size() - written == 1; }
  const serving::turn& now() const { return request->turns[turn]; }
  /// Tokens that the next chunk of the prompt has at most: others may share it until the document ends.
  std::size_t piece(std::size_t chunk) const {
    const std::size_t end = written < request->shared ? request->shared : prompt_end;
    return std::min(chunk, end - written);
  }
  /// The share of the prompt's promised units that it has not taken.
  tessera::offset_t outstanding() const {
    if (state != stage::filling) return 0;
    return tessera::offset_t(double(promised) * double(prompt_end - written) / double(prompt_end - filled_from));
  }
  /// The next turn is there.
  void arrive() {
    state = stage::waiting;
    text.insert(text.end(), now().prompt.begin(), now().prompt.end());
    times = {number, turn, due, 0, 0, index_t(now().prompt.size()), now().answer};
  }
  /// Nothing of it is stored any more.
  void forget() {
    id = -1;
    written = 0;
  }
};

}  // namespace serving
