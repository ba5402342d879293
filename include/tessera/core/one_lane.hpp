// A team of one: what a body that several lanes may share needs where a single thread runs it.
#pragma once

#include "config.hpp"
#include "types.hpp"

TESSERA_NAMESPACE_BEGIN

/// Lanes that run one body together; every lane gets every result.
///   size                           static constexpr int: lanes
///   rank() -> int                  of this lane, from 0
///   sum(x)                         over the lanes, of double or index_t
///   exclusive_sum(x) -> index_t    the sum over the lanes of lower rank
///   sync()                         afterwards every lane reads what any lane has written
/// Backends bring teams of their own: cuda::warp_team.
struct one_lane {
  static constexpr int size = 1;
  TESSERA_HD int rank() const { return 0; }
  template <class T>
  TESSERA_HD T sum(T x) const {
    return x;
  }
  TESSERA_HD index_t exclusive_sum(index_t) const { return 0; }
  TESSERA_HD void sync() const {}
};

TESSERA_NAMESPACE_END
