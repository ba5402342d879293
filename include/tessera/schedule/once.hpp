// Choose when a turn's prompt ends, never while decoding.
#pragma once

#include "../concepts/schedule.hpp"

TESSERA_NAMESPACE_BEGIN

/// Fires once a turn. Tokens generated since are appended and stay until the next turn's prompt ends.
struct once {
  static constexpr const char* name = "once";
  static constexpr bool fires_at(moment at) { return at == moment::prompt_end; }
  bool due(moment now, const turn_clock&) const { return fires_at(now); }
};

static_assert(check_schedule<once>());

TESSERA_NAMESPACE_END
