// Decode attention over a selection of what is stored.
#pragma once

#include "../concepts/attention.hpp"

TESSERA_NAMESPACE_BEGIN

/// Attends the selected tokens that the rule lets a query see; one selection for all query heads of a group.
/// Shapes   as dense_decode, plus a selection of ascending slots per (sequence, kv_head); empty rows are allowed.
/// Limits   a query that sees nothing gets zeros and -infinity.
struct gathered_decode {
  static constexpr const char* name = "gathered_decode";
  static constexpr bool gathers = true;
  logit_rule rule{};
};

static_assert(check_attention<gathered_decode>());

TESSERA_NAMESPACE_END
