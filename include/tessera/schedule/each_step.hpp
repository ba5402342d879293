// Retain when a prompt ends and after every decode step.
#pragma once

#include "../concepts/schedule.hpp"

TESSERA_NAMESPACE_BEGIN

/// Fires at every moment: the cache never holds more than its budget once a step is over.
struct each_step {
  static constexpr const char* name = "each_step";
  static constexpr bool after_steps = true;
  bool due(moment) const { return true; }
};

static_assert(check_schedule<each_step>());

TESSERA_NAMESPACE_END
