// Choose when a turn's prompt ends and again whenever so many tokens more have been decoded.
#pragma once

#include "../concepts/schedule.hpp"
#include "../core/parameters.hpp"

TESSERA_NAMESPACE_BEGIN

/// Fires at a prompt's end and at the end of the step with which a turn has `every`, 2 `every`, ... outputs. A step of several
/// tokens fires once when it reaches or passes such a number.
/// Errors   every out of range: tessera::error.
struct every_outputs {
  static constexpr const char* name = "every_outputs";

  index_t every = 16;

  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::step_end; }
  bool due(moment now, const turn_clock& at) const {
    if (now != moment::step_end) return fires_at(now);
    return at.outputs / every > (at.outputs - at.tokens) / every;
  }

  void check() const { check_parameters(*this); }

  template <class Self, class Visit>
  static void parameters(Self& self, Visit&& visit) {
    visit("every", self.every, value_range{1, most_tokens}, "outputs from one choice to the next");
  }
};

static_assert(check_schedule<every_outputs>());

TESSERA_NAMESPACE_END
