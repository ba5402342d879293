// Dense causal attention of a prompt: every row attends all that it sees.
#pragma once

#include "../concepts/prefill.hpp"

TESSERA_NAMESPACE_BEGIN

/// What a recipe does that names no prefill policy. Engines may use attention of their own instead.
struct dense_prefill {
  static constexpr const char* name = "dense_prefill";
  static constexpr bool chooses_lines = false;
};

static_assert(check_prefill<dense_prefill>());

TESSERA_NAMESPACE_END
