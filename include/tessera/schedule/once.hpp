// Retain when a turn's prompt ends, never while decoding.
#pragma once

#include "../concepts/schedule.hpp"

TESSERA_NAMESPACE_BEGIN

/// Fires once a turn. Tokens generated since are appended and stay until the next turn's prompt ends.
struct once {
  static constexpr const char* name = "once";
  static constexpr bool after_steps = false;
  bool due(moment now) const { return now == moment::prefill_end; }
};

static_assert(check_schedule<once>());

TESSERA_NAMESPACE_END
