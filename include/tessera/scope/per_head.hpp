// Every kv_head chooses for itself.
#pragma once

#include "../concepts/scope.hpp"

TESSERA_NAMESPACE_BEGIN

/// Each kv_head keeps its own slots, by its own scores: what a first stage does that names no scope.
struct per_head {
  static constexpr const char* name = "per_head";
};

static_assert(check_scope<per_head>());

TESSERA_NAMESPACE_END
