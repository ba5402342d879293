// Choose when a turn has so many outputs, and again whenever so many more have been decoded.
#pragma once

#include "../concepts/schedule.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Fires at the end of the step with which a turn has `first`, `first` + `every`, `first` + 2 `every`, ... outputs,
/// counted from the end of the turn's prompt. A step of several tokens fires once when it reaches or passes such a
/// number. With `first` 0 the first choice falls at the prompt's end.
/// Errors   first or every out of range: tessera::error.
struct every_outputs {
  static constexpr const char* name = "every_outputs";

  index_t first = 16;
  index_t every = 16;

  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::step_end; }
  bool due(moment now, const turn_clock& at) const {
    if (now == moment::prompt_end) return first == 0;
    return now == moment::step_end && choices(at.outputs) > choices(at.outputs - at.tokens);
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("first", self.first, value_range{0, max_tokens},
          "outputs of a turn before the first choice; 0: it falls at the prompt's end");
    visit("every", self.every, value_range{1, max_tokens}, "outputs from one choice to the next");
  }

 private:
  /// Choices of a turn until it has so many outputs.
  index_t choices(index_t outputs) const { return outputs < first ? 0 : 1 + (outputs - first) / every; }
};

static_assert(check_schedule<every_outputs>());

TESSERA_NAMESPACE_END
