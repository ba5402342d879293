// Memory: how much something takes, or how much there is.
#pragma once

#include <limits>

#include "../types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Bytes, and pages of a pool; pages are 0 for layouts without a pool.
struct capacity {
  /// What there is of memory that nothing limits.
  static constexpr offset_t unlimited = (std::numeric_limits<offset_t>::max)();

  offset_t bytes = 0;
  offset_t pages = 0;

  /// Whether something that takes `needed` at most has enough of both.
  bool covers(const capacity& needed) const { return needed.bytes <= bytes && needed.pages <= pages; }
  friend bool operator==(const capacity&, const capacity&) = default;
};

TESSERA_NAMESPACE_END
