// Choose when a prompt ends and before every decode step reads.
#pragma once

#include "../concepts/schedule.hpp"

TESSERA_NAMESPACE_BEGIN

/// A step makes room for its own tokens first: it never reads more than the budget.
struct before_each_step {
  static constexpr const char* name = "before_each_step";
  static constexpr bool fires_at(moment at) { return at == moment::prompt_end || at == moment::step_begin; }
  bool due(moment now, const turn_clock&) const { return fires_at(now); }
};

static_assert(check_schedule<before_each_step>());

TESSERA_NAMESPACE_END
