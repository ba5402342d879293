// Choose when a prompt ends and after every decode step.
#pragma once

#include "../concepts/schedule.hpp"

TESSERA_NAMESPACE_BEGIN

/// The cache never holds more than its budget once a step is over. The step itself reads its own tokens on top.
struct each_step {
  static constexpr const char* name = "each_step";
  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::step_end; }
  bool due(moment now, const turn_clock&) const { return fires_at(now); }
};

static_assert(check_schedule<each_step>());

TESSERA_NAMESPACE_END
