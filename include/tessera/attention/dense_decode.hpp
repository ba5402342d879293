// Decode attention over everything that is stored.
#pragma once

#include "../concepts/attention.hpp"

TESSERA_NAMESPACE_BEGIN

/// Attends every stored token that the rule lets a query see.
/// Shapes   q [tokens, q_heads, k_dim] -> out [tokens, q_heads, v_dim], lse [tokens, q_heads] (natural log).
/// Limits   a query that sees nothing gets zeros and -infinity; NaN in a visible key reaches that query's output only.
struct dense_decode {
  static constexpr const char* name = "dense_decode";
  static constexpr bool gathers = false;
  logit_rule rule{};
};

static_assert(check_attention<dense_decode>());

TESSERA_NAMESPACE_END
