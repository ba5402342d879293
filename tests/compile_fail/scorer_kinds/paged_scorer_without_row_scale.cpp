// expect: tessera: a paged scorer needs fitted(double ratio, int k_dim) const, which returns the scorer with page and channels set
// expect: tessera: a paged scorer needs float row_scale(float scale, float chosen, float whole) const
#include <tessera/scorer/page_min_max.hpp>

// `fitted` of the base returns the base.
struct scaleless : tessera::page_min_max {
  float row_scale(float scale) const { return scale; }
};

static_assert(tessera::check_scorer<scaleless>());
