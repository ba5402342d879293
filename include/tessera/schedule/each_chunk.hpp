// Choose whenever a chunk of a prompt has been written.
#pragma once

#include "../concepts/schedule.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// A prompt never holds more than what it keeps and one chunk of `chunk` tokens that have not been judged yet. Engines
/// may write smaller pieces: they are judged together, at the multiples of `chunk` where pieces end there. A larger
/// piece is a chunk of its own. The last chunk is judged when the prompt ends.
struct each_chunk {
  static constexpr const char* name = "each_chunk";
  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::chunk_end; }

  index_t chunk = 2048;

  bool due(moment now, const turn_clock& at) const {
    return now == moment::prompt_end || (now == moment::chunk_end && at.waiting > 0 && at.waiting + at.coming > chunk);
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("chunk", self.chunk, value_range{1, max_tokens}, "tokens of a prompt that are compressed together");
  }
};

static_assert(check_schedule<each_chunk>());

TESSERA_NAMESPACE_END
