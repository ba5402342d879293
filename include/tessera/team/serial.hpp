// The team of one: how a policy body runs on the CPU.
#pragma once

#include "../core/config.hpp"
#include "../core/types.hpp"

TESSERA_NAMESPACE_BEGIN
namespace team {

/// One lane that is the whole team. Results of `sum`, `max` and `scan` hold on every lane, as for any team.
struct serial {
  static constexpr int size = 1;
  TESSERA_HD static constexpr int rank() { return 0; }
  TESSERA_HD float sum(float x) const { return x; }
  TESSERA_HD index_t sum(index_t x) const { return x; }
  TESSERA_HD float max(float x) const { return x; }
  TESSERA_HD index_t scan(index_t) const { return 0; }
  TESSERA_HD void sync() const {}
};

}  // namespace team
TESSERA_NAMESPACE_END
