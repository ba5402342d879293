// The rows of a kv_head lie one after another, in a run of its own.
#pragma once

#include "../concepts/layout.hpp"
#include "../core/views.hpp"

TESSERA_NAMESPACE_BEGIN

/// The rows of a kv_head lie in one run, in position order, new tokens behind them; heads may hold different numbers of
/// tokens. A run that is full moves to a longer one.
struct runs {
  static constexpr const char* name = "runs";
  using table_type = ragged;
};

static_assert(placement<runs>);

TESSERA_NAMESPACE_END
