// expect: tessera: a lagged scorer needs float ranked(index_t rank) const
#include <tessera/scorer/lag_relative.hpp>

struct rankless : tessera::lag_relative {
  double ranked(tessera::index_t rank) const { return rank; }
};

static_assert(tessera::check_scorer<rankless>());
